// What top-k ranks, in fp32 operations that give the same bits on every CPU and GPU: each is a
// single IEEE operation or an explicit fma, and no product feeds an addition that a compiler could
// fuse.
//
// Without a selection bias the scores need not be computed at all: softmax and sigmoid are
// increasing, so the logits themselves are ranked, and scores that round to the same float still
// differ.
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

// Below this, 1 + exp(z) is 1 in fp32 (the half ulp is exp(-16.6)), so sigmoids are exponentials.
// Where every logit of a token is, its sigmoids over their sum are the softmax of the logits, which
// does not underflow.
constexpr float kSigmoidIsExp = -20.0f;

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

// keys [E]: what top-k ranks, from fp32 logits [E]. `bias` [E] may be null.
inline void selection_keys(const RouterOptions& options, const float* logits, const float* bias,
                           int64_t num_experts, float* keys) {
  if (bias == nullptr) {
    for (int64_t e = 0; e < num_experts; ++e) keys[e] = logits[e];
  } else if (!options.score_before_topk) {
    for (int64_t e = 0; e < num_experts; ++e) keys[e] = logits[e] + bias[e];
  } else if (options.score == RouterScore::kSigmoid) {
    for (int64_t e = 0; e < num_experts; ++e) keys[e] = sigmoid(logits[e]) + bias[e];
  } else {
    const float largest = row_max(logits, num_experts);
    float lanes[kSumLanes] = {};
    for (int64_t e = 0; e < num_experts; ++e) {
      keys[e] = exp_nonpositive(logits[e] - largest);
      lanes[e % kSumLanes] += keys[e];
    }
    const float sum = sum_lanes(lanes);
    for (int64_t e = 0; e < num_experts; ++e) {
      const float score = keys[e] / sum;
      keys[e] = score + bias[e];
    }
  }
}

// Order of top-k: larger first, equal values lowest index first, NaN after everything.
inline bool ranks_before(float key_a, int64_t a, float key_b, int64_t b) {
  const bool nan_a = key_a != key_a;
  const bool nan_b = key_b != key_b;
  if (nan_a != nan_b) return nan_b;
  if (!nan_a && key_a != key_b) return key_a > key_b;
  return a < b;
}

}  // namespace dropless::router
