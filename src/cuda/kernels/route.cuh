// First launch of route: one block a chunk of tokens. One warp a token scores and selects; what
// follows needs K lanes, so a warp weighs and counts several tokens at once.
//
// Lane l holds experts l, l + 32, l + 64, ...: the order of sums is then that of
// core/router_math.h, and what top-k ranks has the same bits as on a CPU.
#pragma once

#include <cstdint>
#include <type_traits>

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
  bool divisor_depends;  // on the scores
};

// Softmax of rate * logit over the lanes of a token that hold a choice.
__device__ inline float softmax_of_choices(float logit, float rate, bool is_choice, int lanes) {
  const bool has_nan = group_any(is_choice && logit != logit, lanes);
  const float largest = group_max(is_choice ? logit : -INFINITY, lanes);
  const float below = has_nan ? NAN : logit - largest;
  const float e = is_choice ? router::exp_nonpositive(rate * below) : 0.0f;
  const float sum = group_sum(e, lanes);
  return is_choice ? e / sum : 0.0f;
}

// Every `lanes` lanes, a power of two, hold one token's choices; `largest` and `exp_sum` are those
// of all its logits.
__device__ inline WeighedChoice weigh_choice(const RouterOptions& options, float logit,
                                             float largest, float exp_sum, bool is_choice,
                                             int lanes) {
  const bool elementwise = router::is_positive_elementwise(options.score);
  Choice choice = {0.0f, 0.0f, 0.0f};
  if (options.score == RouterScore::kSoftmax) {
    if (options.score_before_topk) {
      choice.score = is_choice ? router::exp_nonpositive(logit - largest) / exp_sum : 0.0f;
    } else {
      choice.score = softmax_of_choices(logit, 1.0f, is_choice, lanes);
    }
  } else if (is_choice) {
    choice.score = router::elementwise_score(options.score, logit);
  }
  choice.normalized = choice.score;
  float divisor = 1.0f;
  bool is_clamped = false;
  if (options.renormalize) {
    const float sum = group_sum(choice.score, lanes);
    const float eps = options.renormalize_eps;
    is_clamped = options.renormalize_clamp && sum < eps;
    divisor = is_clamped ? eps : options.renormalize_clamp ? sum : sum + eps;
    // Scores of very negative logits underflow, but their ratios are those of exponentials.
    constexpr float kUnderflow = 1e-30f;
    const bool is_exponential = options.score != RouterScore::kIdentity;
    const bool underflows = is_exponential && divisor < kUnderflow && eps == 0.0f;
    choice.normalized = is_choice ? choice.score / divisor : 0.0f;
    if (__any_sync(kFullWarp, is_choice && underflows)) {
      const float rate = router::exp_rate(options.score);
      const float ratio = softmax_of_choices(logit, rate, is_choice, lanes);
      if (underflows) choice.normalized = ratio;
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

// Turns the warps' counts of one expert, `stride` apart, into the slots that precede each warp in
// the chunk, and writes the chunk's count.
template <int kWarps>
__device__ void scan_warps(int* counts, int stride, int32_t* chunk_count) {
  int before = 0;
#pragma unroll 16  // so that the loads overlap
  for (int w = 0; w < kWarps; ++w) {
    const int count = counts[w * stride];
    counts[w * stride] = before;
    before += count;
  }
  *chunk_count = before;
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

// What the warps of a block leave to be added up.
struct WarpParts {
  int* counts;      // [warps, E]
  float* prob_sum;  // [warps, E]
  float* sums;      // [warps, 2]
  int* counters;    // [warps, 2]

  static constexpr int64_t bytes(int64_t warps, int64_t num_experts) {
    return warps * (2 * num_experts + 4) * 4;
  }

  __device__ WarpParts(int* memory, int warps, int num_experts)
      : counts(memory),
        prob_sum(reinterpret_cast<float*>(memory + warps * num_experts)),
        sums(prob_sum + warps * num_experts),
        counters(reinterpret_cast<int*>(sums + warps * 2)) {}
};

// Writes the chunk's sums, warp after warp, and turns the counts into the slots of the chunk that
// precede each warp. Sums of different kinds go to different threads.
template <int kThreads, class T>
__device__ void add_warps(const WarpParts& parts, int num_experts, const RouteTokensParams<T>& p,
                          int64_t chunk) {
  constexpr int kWarps = kThreads / kWarpSize;
  const auto total = [](const auto* from, int stride) {
    std::remove_cvref_t<decltype(*from)> sum = 0;
#pragma unroll 16  // so that the loads overlap
    for (int w = 0; w < kWarps; ++w) sum += from[w * stride];
    return sum;
  };
  for (int i = threadIdx.x; i < 2 * num_experts + 4; i += kThreads) {
    const int e = i - num_experts;
    const int last = e - num_experts;
    if (e < 0) {
      scan_warps<kWarps>(parts.counts + i, num_experts, p.counts + chunk * num_experts + i);
    } else if (last < 0) {
      p.prob_sum[chunk * num_experts + e] = total(parts.prob_sum + e, num_experts);
    } else if (last < 2) {
      p.sums[chunk * 2 + last] = total(parts.sums + last, 2);
    } else {
      p.counters[chunk * 2 + last - 2] = total(parts.counters + last - 2, 2);
    }
  }
}

// Grid: chunks. Block: full warps. Shared: WarpParts.
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
  // Fewer than 2^31 slots, and so tokens, in all.
  const int chunk_begin = blockIdx.x * p.tokens_per_chunk;
  const int chunk_tokens = min(p.tokens_per_chunk, p.tokens - chunk_begin);
  const int tokens_per_warp = (p.tokens_per_chunk + kWarps - 1) / kWarps;
  const int first_of_warp = min(warp * tokens_per_warp, chunk_tokens);
  const int begin = chunk_begin + first_of_warp;
  const int end = begin + min(tokens_per_warp, chunk_tokens - first_of_warp);

  const WarpParts parts(shared, kWarps, num_experts);
  int* histogram = parts.counts + warp * num_experts;
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
  const T* logits = p.logits + static_cast<int64_t>(begin) * num_experts;
  if (begin < end && !in_terms) next.load(logits, num_experts);

  // A batch is as many tokens as a warp has lanes for the choices of.
  const int log2_lanes = 32 - __clz(top_k - 1);
  const int lanes = 1 << log2_lanes;
  const int batch_tokens = kWarpSize >> log2_lanes;
  const int token_in_batch = lane >> log2_lanes;  // whose choices this lane holds,
  const int place = lane & (lanes - 1);           // and which of them
  int batch = begin;
  int id = -1;  // this lane's slot of the last batch
  int rank = 0;
  int slot = 0;
  for (int t = begin; t < end;) {
    batch = t;
    id = -1;
    float largest = 0.0f;
    float exp_sum = 1.0f;
    for (int i = 0; i < batch_tokens && t < end; ++i, ++t, logits += num_experts) {
      TokenScores<V> token = next;
      if (in_terms) {
        // Not ahead of time: three times the registers would hold them.
        const int64_t first = static_cast<int64_t>(t) * num_experts;
        token.load_terms(p.terms + kTerms * first, p.logit_bias, num_experts, p.summed + first);
      } else if (t + 1 < end) {
        next.load(logits + num_experts, num_experts);
      }
      int chosen = kRouteFreely;
      if (p.forced_ids != nullptr) {
        chosen = lane < top_k ? p.forced_ids[t * top_k + lane] : -1;
        const bool freely = __shfl_sync(kFullWarp, chosen, 0) == kRouteFreely;
        chosen = freely ? kRouteFreely : valid_id(chosen, num_experts);
      }
      bool is_padding = !__any_sync(kFullWarp, chosen != -1);
      if (p.mask != nullptr) is_padding |= __all_sync(kFullWarp, p.mask[t] == 0) != 0;
      if (is_padding) continue;
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
      chosen = __shfl_sync(kFullWarp, chosen, place);
      if (token_in_batch == i) {
        id = chosen;
        largest = token.largest;
        exp_sum = token.exp_sum;
      }
    }

    const int token = batch + token_in_batch;
    const bool is_choice = id >= 0;
    const float logit =
        is_choice ? to_float(p.logits[static_cast<int64_t>(token) * num_experts + id]) : 0.0f;
    const Choice choice = weigh_choice(options, logit, largest, exp_sum, is_choice, lanes).choice;
    slot = token * top_k + place;
    if (place < top_k && token < end) {
      p.ids[slot] = id;
      p.weights[slot] = choice.normalized * options.scale;
    }
    // Lanes with the same expert take consecutive ranks in lane order.
    const unsigned same = __match_any_sync(kFullWarp, id);
    const int lower = __popc(same & ((1u << lane) - 1u));
    if (is_choice) rank = histogram[id] + lower;
    __syncwarp();
    if (is_choice && lower == 0) histogram[id] = rank + __popc(same);
    if (is_choice && t < end) p.rank[slot] = rank;
    __syncwarp();
  }

#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    if (e < num_experts) parts.prob_sum[warp * num_experts + e] = prob_sum[j];
  }
  const float entropy = kLn2 * warp_sum(entropy_bits);
  nonfinite = warp_sum(nonfinite);
  if (lane == 0) {
    parts.sums[warp * 2 + 0] = lse_square;
    parts.sums[warp * 2 + 1] = entropy;
    parts.counters[warp * 2 + 0] = real_tokens;
    parts.counters[warp * 2 + 1] = nonfinite;
  }
  __syncthreads();
  add_warps<kThreads>(parts, num_experts, p, chunk);
  __syncthreads();
  const int* before = parts.counts + warp * num_experts;
  if (id >= 0) p.rank[slot] = rank + before[id];
  for (int i = begin * top_k + lane; i < batch * top_k; i += kWarpSize) {
    const int earlier = p.ids[i];
    if (earlier >= 0) p.rank[i] += before[earlier];
  }
}

}  // namespace dropless::cuda
