// What top-k ranks, in fp32 operations that give the same bits on every CPU and GPU: each is a
// single IEEE operation or an explicit fma, and no product feeds an addition that a compiler could
// fuse.
//
// Without a selection bias, and unless scores of a group are added up, the scores need not be
// computed at all: all of them increase with their logit, so the logits themselves are ranked, and
// scores that round to the same float still differ.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "dropless/route.h"

namespace dropless::router {

// exp(x) for x <= 0, to about 1 ulp; 0 below the smallest normal result.
DROPLESS_HOST_DEVICE inline float exp_nonpositive(float x) {
  constexpr float kSmallest = -87.3f;              // exp(-87.34) = 2^-126
  const float z = x >= kSmallest ? x : kSmallest;  // NaN too: no branches, a warp would diverge
  // Adding 1.5*2^23 rounds x/ln2 to an integer n in the low mantissa bits.
  constexpr float kMagic = 12582912.0f;
  const float shifted = std::fma(z, 0x1.715476p+0f, kMagic);
  const float n = shifted - kMagic;
  // ln2 in two parts (Cody & Waite): the first has few enough bits that n * high is exact.
  float r = std::fma(n, -0x1.62e400p-1f, z);
  r = std::fma(n, -0x1.7f7d1cp-20f, r);
  // exp(r) on [-ln2/2, ln2/2] by its Taylor series: the first term left out is below 2^-27.
  float p = 0x1.a01a02p-13f;            // 1/5040
  p = std::fma(p, r, 0x1.6c16c2p-10f);  // 1/720
  p = std::fma(p, r, 0x1.111112p-7f);   // 1/120
  p = std::fma(p, r, 0x1.555556p-5f);   // 1/24
  p = std::fma(p, r, 0x1.555556p-3f);   // 1/6
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kMagic);
  const float result = std::bit_cast<float>(std::bit_cast<int32_t>(p) + exponent * (1 << 23));
  return x >= kSmallest ? result : (x != x ? x : 0.0f);
}

DROPLESS_HOST_DEVICE inline float sigmoid(float z) {
  const float e = exp_nonpositive(z > 0.0f ? -z : z);  // NaN passes through
  const float denominator = 1.0f + e;
  return (z > 0.0f ? 1.0f : e) / denominator;
}

// log(1 + e) / e for e from 0 to 1, to about 1 ulp: 2 atanh(u) = 2 (u + u^3/3 + u^5/5 + ...) with
// u = e / (2 + e), at most 1/3, so that the first term left out is below 2^-32.
DROPLESS_HOST_DEVICE inline float log1p_over(float e) {
  const float denominator = 2.0f + e;
  const float u = e / denominator;
  const float u2 = u * u;
  float p = 1.0f / 17;
  p = std::fma(p, u2, 1.0f / 15);
  p = std::fma(p, u2, 1.0f / 13);
  p = std::fma(p, u2, 1.0f / 11);
  p = std::fma(p, u2, 1.0f / 9);
  p = std::fma(p, u2, 1.0f / 7);
  p = std::fma(p, u2, 1.0f / 5);
  p = std::fma(p, u2, 1.0f / 3);
  p = std::fma(p, u2, 1.0f);
  return 2.0f * p / denominator;
}

DROPLESS_HOST_DEVICE inline float softplus(float z) {
  const float e = exp_nonpositive(z > 0.0f ? -z : z);
  return std::fma(e, log1p_over(e), z > 0.0f ? z : 0.0f);
}

// Below kScoreIsExp, 1 + exp(z) is 1 in fp32 (half an ulp of 1 is exp(-16.6)), so sigmoid(z) is
// exp(z), and sqrt(softplus(z)) is exp(z / 2). Where every logit of a token is below, its scores
// over their sum are a softmax of the logits, or of half of them, which does not underflow.
constexpr float kScoreIsExp = -20.0f;

// r of the score that is exp(r z) there.
DROPLESS_HOST_DEVICE inline float exp_rate(RouterScore score) {
  return score == RouterScore::kSqrtSoftplus ? 0.5f : 1.0f;
}

DROPLESS_HOST_DEVICE inline float sqrt_softplus(float z) {
  return z < kScoreIsExp ? exp_nonpositive(0.5f * z) : std::sqrt(softplus(z));
}

// Scores of each logit alone that are positive: they are normalised over experts for the balance
// statistics, while the identity leaves those to softmax.
DROPLESS_HOST_DEVICE constexpr bool is_positive_elementwise(RouterScore score) {
  return score == RouterScore::kSigmoid || score == RouterScore::kSqrtSoftplus;
}

// Every score but softmax.
DROPLESS_HOST_DEVICE inline float elementwise_score(RouterScore score, float z) {
  if (score == RouterScore::kSigmoid) return sigmoid(z);
  return score == RouterScore::kSqrtSoftplus ? sqrt_softplus(z) : z;
}

// d log(score) / dz of a positive elementwise score, without cancellation.
DROPLESS_HOST_DEVICE inline float log_slope(RouterScore score, float z) {
  if (score == RouterScore::kSigmoid) return sigmoid(-z);
  if (z < kScoreIsExp) return 0.5f;
  return 0.5f * sigmoid(z) / softplus(z);
}

// Whether scores are ranked, or the logits in their stead.
DROPLESS_HOST_DEVICE constexpr bool ranks_scores(const RouterOptions& options, bool biased) {
  const bool added_up = options.num_groups > 1 && options.group_score_experts > 1;
  return options.score_before_topk && (biased || added_up);
}

// What takes the place of the ranked values of groups that are not kept.
DROPLESS_HOST_DEVICE inline float masked_key(const RouterOptions& options, bool biased) {
  // Where logits stand for scores that are positive, 0 is below them all.
  const bool stand_in = options.score_before_topk && !ranks_scores(options, biased) &&
                        options.score != RouterScore::kIdentity;
  return options.group_mask_zero && !stand_in ? 0.0f : -INFINITY;
}

// Sums over experts use 32 partial sums (expert e goes to partial e mod 32, in order), added
// pairwise at distances 16, 8, 4, 2, 1: one lane each for a warp, two vectors on a CPU.
constexpr int kSumLanes = 32;

inline float sum_lanes(float (&lanes)[kSumLanes]) {
  for (int distance = kSumLanes / 2; distance > 0; distance /= 2) {
    for (int i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
  }
  return lanes[0];
}

// Largest logit of a row; NaN if any is NaN.
inline float row_max(const float* logits /* [E] */, int64_t num_experts) {
  float largest = -INFINITY;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (!(logits[e] <= largest)) largest = logits[e];
    if (largest != largest) break;
  }
  return largest;
}

// Order of top-k: larger first, equal values lowest index first, NaN after everything.
inline bool ranks_before(float key_a, int64_t a, float key_b, int64_t b) {
  const bool nan_a = key_a != key_a;
  const bool nan_b = key_b != key_b;
  if (nan_a != nan_b) return nan_b;
  if (!nan_a && key_a != key_b) return key_a > key_b;
  return a < b;
}

// Sum, from the first in the order of top-k, of the `count` best of keys [size].
inline float sum_of_best(const float* keys, int64_t size, int64_t count) {
  float sum = 0.0f;
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < size; ++e) {
      const bool is_left = last < 0 || ranks_before(keys[last], last, keys[e], e);
      if (is_left && (best < 0 || ranks_before(keys[e], e, keys[best], best))) best = e;
    }
    sum += keys[best];
    last = best;
  }
  return sum;
}

// Replaces the keys [E] of groups that are not kept; `group_scores` [num_groups] is scratch.
inline void mask_groups(const RouterOptions& options, float masked, int64_t num_experts,
                        float* keys, float* group_scores) {
  const int64_t groups = options.num_groups;
  const int64_t size = num_experts / groups;
  for (int64_t g = 0; g < groups; ++g) {
    group_scores[g] = sum_of_best(keys + g * size, size, options.group_score_experts);
  }
  for (int64_t g = 0; g < groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < groups; ++other) {
      better += ranks_before(group_scores[other], other, group_scores[g], g) ? 1 : 0;
    }
    if (better < options.groups_kept) continue;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) keys[e] = masked;
  }
}

// keys [E]: what top-k ranks, from fp32 logits [E]. `bias` [E] may be null; `group_scores`
// [num_groups] is scratch.
inline void selection_keys(const RouterOptions& options, const float* logits, const float* bias,
                           int64_t num_experts, float* keys, float* group_scores) {
  const bool biased = bias != nullptr;
  if (!ranks_scores(options, biased)) {
    for (int64_t e = 0; e < num_experts; ++e) keys[e] = logits[e];
  } else if (options.score != RouterScore::kSoftmax) {
    for (int64_t e = 0; e < num_experts; ++e) keys[e] = elementwise_score(options.score, logits[e]);
  } else {
    const float largest = row_max(logits, num_experts);
    float lanes[kSumLanes] = {};
    for (int64_t e = 0; e < num_experts; ++e) {
      keys[e] = exp_nonpositive(logits[e] - largest);
      lanes[e % kSumLanes] += keys[e];
    }
    const float sum = sum_lanes(lanes);
    for (int64_t e = 0; e < num_experts; ++e) keys[e] /= sum;
  }
  if (biased) {
    for (int64_t e = 0; e < num_experts; ++e) keys[e] += bias[e];
  }
  if (options.num_groups > 1) {
    mask_groups(options, masked_key(options, biased), num_experts, keys, group_scores);
  }
}

}  // namespace dropless::router
