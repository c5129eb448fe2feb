// First launch of route: one warp a token scores, selects, weighs and counts; one block a chunk of
// tokens.
//
// Lane l holds experts l, l + 32, l + 64, ...: the order of sums is then that of
// core/router_math.h, and what top-k ranks has the same bits as on a CPU.
#pragma once

#include <cstdint>

#include "core/router_math.h"
#include "cuda/kernels/select_experts.cuh"
#include "cuda/kernels/token_scores.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

template <class T>
struct RouteTokensParams {
  RouterOptions options;
  const T* logits;            // [T, E]
  const float* terms;         // [T, 3, E] or null: the logits are their sums, written to `summed`,
  float* summed;              // the same array
  const float* logit_bias;    // [E] or null, added to the terms
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

// What is known of a router when its kernel is compiled: the branches of the others, and registers
// for what only they need, are then not there.
enum class RouterKind {
  kAny,
  kSoftmax,        // without selection bias and groups
  kBiasedSigmoid,  // DeepSeek-V3's, in groups or not
};

inline RouterKind router_kind(const RouterOptions& options, bool biased) {
  if (options.score == RouterScore::kSoftmax && !biased && options.num_groups == 1) {
    return RouterKind::kSoftmax;
  }
  const bool ranks_sigmoid = options.score == RouterScore::kSigmoid && options.score_before_topk;
  return ranks_sigmoid && biased ? RouterKind::kBiasedSigmoid : RouterKind::kAny;
}

template <RouterKind kKind>
__device__ RouterOptions known_options(RouterOptions options) {
  if constexpr (kKind == RouterKind::kSoftmax) {
    options.score = RouterScore::kSoftmax;
    options.num_groups = 1;
  } else if constexpr (kKind == RouterKind::kBiasedSigmoid) {
    options.score = RouterScore::kSigmoid;
    options.score_before_topk = true;
  }
  return options;
}

// Grid: chunks. Block: `warps` full warps. Shared: [warps, E] of 4 bytes, at least [warps, 4].
// There are no more blocks than SMs, so one of them may take all registers of its SM.
template <class T, int V, int kThreads, RouterKind kKind>
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

  const RouterOptions options = known_options<kKind>(p.options);
  const bool biased =
      kKind == RouterKind::kAny ? p.bias != nullptr : kKind == RouterKind::kBiasedSigmoid;
  float bias[V] = {};
  if (biased) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (lane + kWarpSize * j < num_experts) bias[j] = p.bias[lane + kWarpSize * j];
    }
  }
  const bool exact_softmax = ranks_softmax(options, biased);
  // bfloat16 logits that are ranked themselves.
  const bool is_lossless = sizeof(T) == 2 && !router::ranks_scores(options, biased) && !biased;

  float prob_sum[V] = {};
  float lse_square = 0.0f;
  float entropy_bits = 0.0f;  // the warp's is the sum over its lanes
  int real_tokens = 0;
  int nonfinite = 0;

  TokenScores<V> next;
  const bool in_terms = p.terms != nullptr;
  if (begin < end && !in_terms) next.load(p.logits + begin * num_experts, num_experts);
  for (int64_t t = begin; t < end; ++t) {
    TokenScores<V> token = next;
    if (in_terms) {
      // Not ahead of time: three times the registers would hold them.
      token.load_terms(p.terms + t * kTerms * num_experts, p.logit_bias, num_experts,
                       p.summed + t * num_experts);
    } else if (t + 1 < end) {
      next.load(p.logits + (t + 1) * num_experts, num_experts);
    }
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
    token.compute(options.score, exact_softmax, num_experts);
    const float inverse = 1.0f / token.score_sum;
#pragma unroll
    for (int j = 0; j < V; ++j) prob_sum[j] += token.score[j] * inverse;
    lse_square += token.lse * token.lse;
    entropy_bits += token.entropy_bits(options.score) * inverse;
    ++real_tokens;
    nonfinite += token.nonfinite;

    if (__any_sync(kFullWarp, chosen == kRouteFreely)) {
      uint32_t keys[V];
      selection_keys(options, token, biased, bias, num_experts, keys);
      chosen = select_experts(keys, top_k, is_lossless);
    }
    const bool is_choice = chosen >= 0;
    const float logit = is_choice ? to_float(p.logits[t * num_experts + chosen]) : 0.0f;
    const Choice choice =
        weigh_choice(options, logit, token.largest, token.exp_sum, is_choice).choice;
    if (is_slot) {
      p.ids[slot] = chosen;
      p.weights[slot] = choice.normalized * options.scale;
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
