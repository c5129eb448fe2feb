// First launch of route: one warp a token scores, selects, weighs and counts; one block a chunk of
// tokens.
//
// Lane l holds experts l, l + 32, l + 64, ...: the order of sums is then that of
// core/router_math.h, and what top-k ranks has the same bits as on a CPU.
#pragma once

#include <cstdint>

#include "core/router_math.h"
#include "cuda/kernels/select_experts.cuh"
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

// One token's logits and what follows from them, spread over a warp: element j is expert lane + 32
// j.
template <int V>
struct TokenScores {
  float logit[V];   // -inf past the last expert
  float score[V];   // exp(logit - largest), or an elementwise score
  float largest;    // of the logits; NaN if one of them is NaN
  float exp_sum;    // sum of exp(logit - largest)
  float score_sum;  // sum of score
  float lse;        // logsumexp(logits)
  float entropy;    // of score / score_sum, in nats

  // Whether elementwise scores are multiplied by a factor, the same in all lanes, that makes the
  // largest 1: they would underflow.
  __device__ bool is_scaled_up() const { return largest < router::kScoreIsExp; }

  template <class T>
  __device__ void load(const T* logits /* [E] */, int num_experts) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int e = lane_id() + kWarpSize * j;
      logit[j] = e < num_experts ? to_float(logits[e]) : -INFINITY;
    }
  }

  __device__ void compute(RouterScore kind) {
    float largest_seen = -INFINITY;
    bool has_nan = false;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      largest_seen = fmaxf(largest_seen, logit[j]);
      has_nan |= logit[j] != logit[j];
    }
    largest_seen = warp_max(largest_seen);
    largest = __any_sync(kFullWarp, has_nan) ? NAN : largest_seen;

    exp_sum = 0.0f;
    float weighted = 0.0f;  // of exp(d) * d, d = logit - largest
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float d = logit[j] - largest;
      score[j] = router::exp_nonpositive(d);
      exp_sum += score[j];
      weighted += score[j] > 0.0f ? score[j] * d : 0.0f;
    }
    exp_sum = warp_sum(exp_sum);
    float log_sum = logf(exp_sum);
    lse = largest + log_sum;
    score_sum = exp_sum;
    if (router::is_positive_elementwise(kind)) {
      score_elementwise(kind);
      score_sum = weighted = 0.0f;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        score_sum += score[j];
        weighted += score[j] > 0.0f ? score[j] * logf(score[j]) : 0.0f;
      }
      score_sum = warp_sum(score_sum);
      log_sum = logf(score_sum);
    }
    entropy = log_sum - warp_sum(weighted) / score_sum;
  }

  __device__ void score_elementwise(RouterScore kind) {
    if (is_scaled_up()) {
      // Sigmoids are the exponentials that `score` holds already.
      if (kind == RouterScore::kSigmoid) return;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        score[j] = router::exp_nonpositive(router::exp_rate(kind) * (logit[j] - largest));
      }
    } else if (kind == RouterScore::kSigmoid) {
#pragma unroll
      for (int j = 0; j < V; ++j) score[j] = router::sigmoid(logit[j]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) score[j] = router::sqrt_softplus(logit[j]);
    }
  }
};

// What top-k ranks, as router::selection_keys defines it.
template <int V>
__device__ void selection_keys(const RouterOptions& options, const TokenScores<V>& token,
                               const float* bias, int num_experts, uint32_t (&keys)[V]) {
  const bool biased = bias != nullptr;
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
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane_id() + kWarpSize * j;
    if (biased && e < num_experts) value[j] += bias[e];
    keys[j] = e < num_experts ? ordered_key(value[j]) : kNoKey;
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
  __shared__ int chosen_of_warp[kWarps][kWarpSize];
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

  float prob_sum[V] = {};
  float lse_square = 0.0f;
  float entropy = 0.0f;
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
    token.compute(p.options.score);
    // The sum of exponentials is at least 1, but that of other scores may be too small for an
    // inverse.
    const bool elementwise = router::is_positive_elementwise(p.options.score);
    const float inverse = 1.0f / token.score_sum;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      prob_sum[j] += elementwise ? token.score[j] / token.score_sum : token.score[j] * inverse;
      if (lane + kWarpSize * j < num_experts && !isfinite(token.logit[j])) ++nonfinite;
    }
    lse_square += token.lse * token.lse;
    entropy += token.entropy;
    ++real_tokens;

    if (__any_sync(kFullWarp, chosen == kRouteFreely)) {
      uint32_t keys[V];
      selection_keys(p.options, token, p.bias, num_experts, keys);
      select_experts(keys, top_k, chosen_of_warp[warp]);
      chosen = is_slot ? chosen_of_warp[warp][lane] : -1;
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
