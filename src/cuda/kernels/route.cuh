// First launch of route: one warp a token scores, selects, weighs and counts; one block a chunk of
// tokens.
//
// Lane l holds experts l, l + 32, l + 64, ...: the order of sums is then that of
// core/router_math.h, and what top-k ranks has the same bits as on a CPU.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/router_math.h"
#include "cuda/kernels/select_experts.cuh"
#include "cuda/ptx/approximate.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

template <class T>
struct RouteTokensParams {
  RouterOptions options;
  const T* logits;            // [T, E]
  const float* bias;          // [E] or null
  const uint8_t* mask;        // [T] or null
  const int32_t* forced_ids;  // [T, K] or null
  int32_t* ids;               // [T, K]
  float* weights;             // [T, K]
  int32_t* rank;              // [T, K]: among the slots of the chunk with the same expert
  int32_t* counts;            // [chunks, E]
  float* prob_sum;            // [chunks, E]
  float* sums;                // [chunks, 2]
  int32_t* counters;          // [chunks, 2]
  int tokens;
  int num_experts;
  int experts_per_token;
  int tokens_per_chunk;
};

// router::sigmoid to the bit, as the test over all floats shows: its division without the branch
// for operands that do not occur, numerators above 1 and denominators outside [1, 2].
__device__ inline float sigmoid_to_the_bit(float z) {
  const float e = router::exp_nonpositive(-fabsf(z));
  const float denominator = 1.0f + e;
  const float numerator = z > 0.0f ? 1.0f : e;
  float inverse = ptx::reciprocal_approximate(denominator);
  inverse = fmaf(fmaf(-denominator, inverse, 1.0f), inverse, inverse);
  const float quotient = numerator * inverse;
  return fmaf(fmaf(-denominator, quotient, numerator), inverse, quotient);
}

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
// Above every exponent that counts, and no infinity: 0 times it is 0.
constexpr float kNoExponent = 1000.0f;

// One token's logits and what follows from them, spread over a warp: element j is expert lane + 32
// j.
template <int V>
struct TokenScores {
  float logit[V];   // the lowest float past the last expert
  float score[V];   // exp(logit - largest), or an elementwise score; 0 past the last expert
  float largest;    // of the logits; NaN if one of them is NaN
  float exp_sum;    // sum of exp(logit - largest)
  float score_sum;  // sum of score: at least 2e-9, so that its inverse is finite
  float log_exp_sum;
  float lse;      // logsumexp(logits)
  int nonfinite;  // logits that are not finite, in this lane

  // Whether elementwise scores are multiplied by a factor, the same in all lanes, that makes the
  // largest 1: they would underflow.
  __device__ bool is_scaled_up() const { return largest < router::kScoreIsExp; }

  template <class T>
  __device__ void load(const T* logits /* [E] */, int num_experts) {
    const T* from = logits + lane_id();
    if (num_experts == kWarpSize * V) {
#pragma unroll
      for (int j = 0; j < V; ++j) logit[j] = to_float(from[kWarpSize * j]);
      return;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      logit[j] = lane_id() + kWarpSize * j < num_experts ? to_float(from[kWarpSize * j])
                                                         : -std::numeric_limits<float>::max();
    }
  }

  // `exact_softmax`: the scores are ranked, so they must have the bits of router::selection_keys.
  __device__ void compute(RouterScore kind, bool exact_softmax, int num_experts) {
    find_largest(num_experts);
    exp_sum = 0.0f;
    if (exact_softmax) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const bool is_expert = lane_id() + kWarpSize * j < num_experts;
        score[j] = is_expert ? router::exp_nonpositive(logit[j] - largest) : 0.0f;
        exp_sum += score[j];
      }
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        score[j] = ptx::exp2_approximate(kLog2E * (logit[j] - largest));
        exp_sum += score[j];
      }
    }
    exp_sum = warp_sum(exp_sum);
    log_exp_sum = logf(exp_sum);
    lse = largest + log_exp_sum;
    score_sum = exp_sum;
    if (!router::is_positive_elementwise(kind)) return;
    score_elementwise(kind);
    score_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) score_sum += score[j];
    score_sum = warp_sum(score_sum);
  }

  // This lane's part of the entropy of score / score_sum, in bits, times score_sum. Exactly 0 for
  // one expert alone.
  __device__ float entropy_bits(RouterScore kind) const {
    float sum = 0.0f;
    if (router::is_positive_elementwise(kind)) {
      const float log2_sum = ptx::log2_approximate(score_sum);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sum += score[j] * fminf(log2_sum - ptx::log2_approximate(score[j]), kNoExponent);
      }
    } else {
      const float log2_sum = kLog2E * log_exp_sum;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sum += score[j] * fminf(log2_sum - kLog2E * (logit[j] - largest), kNoExponent);
      }
    }
    return sum;
  }

 private:
  __device__ void find_largest(int num_experts) {
    float seen = -INFINITY;
    float zero = 0.0f;  // NaN if a logit is not finite
#pragma unroll
    for (int j = 0; j < V; ++j) {
      seen = fmaxf(seen, logit[j]);
      zero = fmaf(logit[j], 0.0f, zero);
    }
    largest = key_value(__reduce_max_sync(kFullWarp, ordered_key(seen)));
    nonfinite = 0;
    if (!__any_sync(kFullWarp, zero != 0.0f)) return;
    bool has_nan = false;
    bool has_number = false;  // above -inf
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (lane_id() + kWarpSize * j >= num_experts) continue;
      nonfinite += isfinite(logit[j]) ? 0 : 1;
      has_nan |= logit[j] != logit[j];
      has_number |= logit[j] > -INFINITY;
    }
    if (!__any_sync(kFullWarp, has_number)) largest = -INFINITY;
    if (__any_sync(kFullWarp, has_nan)) largest = NAN;
  }

  __device__ void score_elementwise(RouterScore kind) {
    if (is_scaled_up()) {
      // Sigmoids are the exponentials that `score` holds already.
      if (kind == RouterScore::kSigmoid) return;
      const float rate = kLog2E * router::exp_rate(kind);
#pragma unroll
      for (int j = 0; j < V; ++j) score[j] = ptx::exp2_approximate(rate * (logit[j] - largest));
    } else if (kind == RouterScore::kSigmoid) {
#pragma unroll
      for (int j = 0; j < V; ++j) score[j] = sigmoid_to_the_bit(logit[j]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) score[j] = router::sqrt_softplus(logit[j]);
    }
  }
};

// Whether top-k ranks softmax scores.
__device__ inline bool ranks_softmax(const RouterOptions& options, bool biased) {
  return options.score == RouterScore::kSoftmax && router::ranks_scores(options, biased);
}

// What top-k ranks, as router::selection_keys defines it. `bias` is this lane's, if `biased`.
template <int V>
__device__ void selection_keys(const RouterOptions& options, const TokenScores<V>& token,
                               bool biased, const float (&bias)[V], int num_experts,
                               uint32_t (&keys)[V]) {
  float value[V];
  // Branches around whole loops: inside, both sides would be computed for every expert.
  if (!router::ranks_scores(options, biased) || options.score == RouterScore::kIdentity) {
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = token.logit[j];
  } else if (options.score == RouterScore::kSoftmax) {
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = token.score[j] / token.exp_sum;
  } else if (token.is_scaled_up()) {
    const float rate = router::exp_rate(options.score);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = router::exp_nonpositive(rate * token.logit[j]);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = token.score[j];
  }
  if (biased) {
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] += bias[j];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    keys[j] = lane_id() + kWarpSize * j < num_experts ? ordered_key(value[j]) : kNoKey;
  }
  if (options.num_groups > 1) {
    mask_groups(options.num_groups, options.groups_kept, options.group_score_experts,
                ordered_key(router::masked_key(options, biased)), num_experts, keys);
  }
}

// One chosen expert, in the lane of its slot; all 0 in the other lanes.
struct Choice {
  float score;
  float normalized;  // the weight before `scale`
  float slope;       // d normalized / d logit while the weights' divisor stays; not of softmax
};

// The choices of a token share their weights' divisor.
struct WeighedChoice {
  Choice choice;
  bool divisor_depends;  // on the scores; the same in all lanes
};

// Softmax of rate * logit over the lanes that hold a choice.
__device__ inline float softmax_of_choices(float logit, float rate, bool is_choice) {
  const bool has_nan = __any_sync(kFullWarp, is_choice && logit != logit);
  const float largest = has_nan ? NAN : warp_max(is_choice ? logit : -INFINITY);
  const float e = is_choice ? router::exp_nonpositive(rate * (logit - largest)) : 0.0f;
  const float sum = warp_sum(e);
  return is_choice ? e / sum : 0.0f;
}

// `largest` and `exp_sum` are those of all the token's logits.
__device__ inline WeighedChoice weigh_choice(const RouterOptions& options, float logit,
                                             float largest, float exp_sum, bool is_choice) {
  const bool elementwise = router::is_positive_elementwise(options.score);
  Choice choice = {0.0f, 0.0f, 0.0f};
  if (options.score == RouterScore::kSoftmax) {
    if (options.score_before_topk) {
      choice.score = is_choice ? router::exp_nonpositive(logit - largest) / exp_sum : 0.0f;
    } else {
      choice.score = softmax_of_choices(logit, 1.0f, is_choice);
    }
  } else if (is_choice) {
    choice.score = router::elementwise_score(options.score, logit);
  }
  choice.normalized = choice.score;
  float divisor = 1.0f;
  bool is_clamped = false;
  if (options.renormalize) {
    const float sum = warp_sum(choice.score);
    const float eps = options.renormalize_eps;
    is_clamped = options.renormalize_clamp && sum < eps;
    divisor = is_clamped ? eps : options.renormalize_clamp ? sum : sum + eps;
    // Scores of very negative logits underflow, but their ratios are those of exponentials.
    constexpr float kUnderflow = 1e-30f;
    const bool is_exponential = options.score != RouterScore::kIdentity;
    if (is_exponential && divisor < kUnderflow && eps == 0.0f) {
      choice.normalized = softmax_of_choices(logit, router::exp_rate(options.score), is_choice);
    } else {
      choice.normalized = is_choice ? choice.score / divisor : 0.0f;
    }
  }
  if (elementwise) {
    choice.slope = choice.normalized * router::log_slope(options.score, logit);
  } else {
    choice.slope = 1.0f / divisor;  // of the identity
  }
  return {choice, options.renormalize && !is_clamped};
}

// The ids of a token's slots, one a lane, without those that are no expert or repeat an earlier
// slot's: -1.
__device__ inline int valid_id(int id, int num_experts) {
  const unsigned same = __match_any_sync(kFullWarp, id);
  const unsigned lower = (1u << lane_id()) - 1u;
  return id >= 0 && id < num_experts && (same & lower) == 0 ? id : -1;
}

// Turns the warps' counts [warps, E] into the slots that precede each warp in the chunk, and writes
// the chunk's counts [E].
template <int kWarps>
__device__ void scan_over_warps(int* counts_of_warp, int num_experts, int32_t* chunk_counts) {
  for (int e = threadIdx.x; e < num_experts; e += kWarps * kWarpSize) {
    int before = 0;
#pragma unroll 16  // so that the loads overlap
    for (int w = 0; w < kWarps; ++w) {
      const int count = counts_of_warp[w * num_experts + e];
      counts_of_warp[w * num_experts + e] = before;
      before += count;
    }
    chunk_counts[e] = before;
  }
}

// Adds to the rank of every slot of a chunk the slots that precede its warp; warps own equal runs
// of `slots_per_warp` slots. `ids` and `rank` [slots] are the chunk's.
__device__ inline void add_ranks_of_warps(const int* before_warp, int num_experts, int slots,
                                          int slots_per_warp, const int32_t* ids, int32_t* rank) {
  for (int i = threadIdx.x; i < slots; i += blockDim.x) {
    const int id = ids[i];
    if (id >= 0 && id < num_experts) rank[i] += before_warp[i / slots_per_warp * num_experts + id];
  }
}

// Grid: chunks. Block: `warps` full warps. Shared: [warps, E] of 4 bytes, at least [warps, 4].
// There are no more blocks than SMs, so one of them may take all registers of its SM.
template <class T, int V, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) route_tokens_kernel(RouteTokensParams<T> p) {
  constexpr int kWarps = kThreads / kWarpSize;
  extern __shared__ int shared[];
  // A broadcast tells the compiler that the warp's loop below does not diverge.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = lane_id();
  const int num_experts = p.num_experts;
  const int top_k = p.experts_per_token;
  const int64_t chunk = blockIdx.x;
  const int64_t chunk_begin = chunk * p.tokens_per_chunk;
  const int64_t chunk_end = min(chunk_begin + p.tokens_per_chunk, static_cast<int64_t>(p.tokens));
  const int tokens_per_warp = (p.tokens_per_chunk + kWarps - 1) / kWarps;
  const int64_t begin = chunk_begin + warp * tokens_per_warp;
  const int64_t end = min(begin + tokens_per_warp, chunk_end);

  int* histogram = shared + warp * num_experts;
  for (int e = lane; e < num_experts; e += kWarpSize) histogram[e] = 0;
  __syncwarp();

  const bool biased = p.bias != nullptr;
  float bias[V] = {};
  if (biased) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (lane + kWarpSize * j < num_experts) bias[j] = p.bias[lane + kWarpSize * j];
    }
  }
  const bool exact_softmax = ranks_softmax(p.options, biased);
  // bfloat16 logits that are ranked themselves.
  const bool is_lossless = sizeof(T) == 2 && !router::ranks_scores(p.options, biased) && !biased;

  float prob_sum[V] = {};
  float lse_square = 0.0f;
  float entropy_bits = 0.0f;  // the warp's is the sum over its lanes
  int real_tokens = 0;
  int nonfinite = 0;

  TokenScores<V> next;
  if (begin < end) next.load(p.logits + begin * num_experts, num_experts);
  for (int64_t t = begin; t < end; ++t) {
    TokenScores<V> token = next;
    if (t + 1 < end) next.load(p.logits + (t + 1) * num_experts, num_experts);
    const int64_t slot = t * top_k + lane;
    const bool is_slot = lane < top_k;
    int chosen = kRouteFreely;
    if (p.forced_ids != nullptr) {
      chosen = is_slot ? p.forced_ids[slot] : -1;
      const bool freely = __shfl_sync(kFullWarp, chosen, 0) == kRouteFreely;
      chosen = freely ? kRouteFreely : valid_id(chosen, num_experts);
    }
    bool is_padding = !__any_sync(kFullWarp, chosen != -1);
    if (p.mask != nullptr) is_padding |= __all_sync(kFullWarp, p.mask[t] == 0) != 0;
    if (is_padding) {
      if (is_slot) {
        p.ids[slot] = -1;
        p.weights[slot] = 0.0f;
      }
      continue;
    }
    token.compute(p.options.score, exact_softmax, num_experts);
    const float inverse = 1.0f / token.score_sum;
#pragma unroll
    for (int j = 0; j < V; ++j) prob_sum[j] += token.score[j] * inverse;
    lse_square += token.lse * token.lse;
    entropy_bits += token.entropy_bits(p.options.score) * inverse;
    ++real_tokens;
    nonfinite += token.nonfinite;

    if (__any_sync(kFullWarp, chosen == kRouteFreely)) {
      uint32_t keys[V];
      selection_keys(p.options, token, biased, bias, num_experts, keys);
      chosen = select_experts(keys, top_k, is_lossless);
    }
    const bool is_choice = chosen >= 0;
    const float logit = is_choice ? to_float(p.logits[t * num_experts + chosen]) : 0.0f;
    const Choice choice =
        weigh_choice(p.options, logit, token.largest, token.exp_sum, is_choice).choice;
    if (is_slot) {
      p.ids[slot] = chosen;
      p.weights[slot] = choice.normalized * p.options.scale;
    }
    if (is_choice) p.rank[slot] = histogram[chosen]++;  // the K experts of a token differ
    __syncwarp();
  }
  const float entropy = kLn2 * warp_sum(entropy_bits);

  __syncthreads();
  scan_over_warps<kWarps>(shared, num_experts, p.counts + chunk * num_experts);
  __syncthreads();
  add_ranks_of_warps(shared, num_experts, static_cast<int>(chunk_end - chunk_begin) * top_k,
                     tokens_per_warp * top_k, p.ids + chunk_begin * top_k,
                     p.rank + chunk_begin * top_k);
  __syncthreads();

  // The statistics, warp after warp, in the memory of the counts.
  float* partial = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    if (e < num_experts) partial[warp * num_experts + e] = prob_sum[j];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    float sum = 0.0f;
#pragma unroll 16
    for (int w = 0; w < kWarps; ++w) sum += partial[w * num_experts + e];
    p.prob_sum[chunk * num_experts + e] = sum;
  }
  __syncthreads();
  nonfinite = warp_sum(nonfinite);
  if (lane == 0) {
    partial[warp * 4 + 0] = lse_square;
    partial[warp * 4 + 1] = entropy;
    shared[warp * 4 + 2] = real_tokens;
    shared[warp * 4 + 3] = nonfinite;
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    float sum = 0.0f;
    int count = 0;
    for (int w = 0; w < kWarps; ++w) {
      sum += partial[w * 4 + threadIdx.x];
      count += shared[w * 4 + 2 + threadIdx.x];
    }
    p.sums[chunk * 2 + threadIdx.x] = sum;
    p.counters[chunk * 2 + threadIdx.x] = count;
  }
}

}  // namespace dropless::cuda
