// One token's logits over a warp, and the scores and sums that routing takes from them.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/router_math.h"
#include "cuda/ptx/approximate.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/ordered_key.cuh"
#include "cuda/tile/warp.cuh"
#include "dropless/router_terms.h"

namespace dropless::cuda {

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

  // The logits from their terms [3, E], and into `summed` [E].
  __device__ void load_terms(const float* terms, const float* bias, int num_experts,
                             float* summed) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int e = lane_id() + kWarpSize * j;
      logit[j] = -std::numeric_limits<float>::max();
      if (e >= num_experts) continue;
      logit[j] = (terms[2 * num_experts + e] + terms[num_experts + e]) + terms[e];
      if (bias != nullptr) logit[j] += bias[e];
      summed[e] = logit[j];
    }
    __syncwarp();  // other lanes will read them
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

}  // namespace dropless::cuda
