// Activations of the gated feed-forward and their derivatives, in fp32.
#pragma once

#include <cuda_bf16.h>

#include "dropless/experts.h"

namespace dropless::cuda {

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// exp2 and the reciprocal in hardware: two units in the last place each, far below bf16's rounding. For
// x below -88 the exponential is infinite and the result 0.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

struct ActivationValue {
  float value;       // act(x)
  float derivative;  // act'(x)
};

template <ActivationKind kKind>
__device__ __forceinline__ ActivationValue activate_with_derivative(float x) {
  if constexpr (kKind == ActivationKind::kSilu) {
    const float s = sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
  } else if constexpr (kKind == ActivationKind::kGelu) {
    constexpr float kInvSqrt2 = 0.70710678f, kInvSqrt2Pi = 0.39894228f;
    const float phi = 0.5f * (1.0f + erff(x * kInvSqrt2));
    return {x * phi, phi + x * kInvSqrt2Pi * __expf(-0.5f * x * x)};
  } else {
    constexpr float kSqrt2OverPi = 0.79788456f, kCubic = 0.044715f;
    const float inner = kSqrt2OverPi * (x + kCubic * x * x * x);
    const float t = 2.0f * sigmoid(2.0f * inner) - 1.0f;  // tanh(inner)
    const float slope = kSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope};
  }
}

template <ActivationKind kKind>
__device__ __forceinline__ float activate(float x) {
  return activate_with_derivative<kKind>(x).value;
}

}  // namespace dropless::cuda
