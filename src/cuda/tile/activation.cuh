// Activations of the gated feed-forward and their derivatives, in fp32.
#pragma once

#include <cuda_bf16.h>

#include "dropless/experts.h"

namespace dropless::cuda {

__device__ __forceinline__ float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// 2^x and 1/x in hardware, subnormals as 0: two units in the last place each, far below bf16's
// rounding. For x below -88 the power is infinite and the result 0. The library's forms of both
// spend instructions on ranges that do not occur here, and a tile has 128  * 128 of them.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kMinusLog2E = -1.44269504f;
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(kMinusLog2E * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

struct ActivationValue {
  float value;       // act(x)
  float derivative;  // act'(x)
};

template <ActivationKind kKind>
__device__ __forceinline__ ActivationValue activate_with_derivative(float x) {
  if constexpr (kKind == ActivationKind::kSilu) {
    const float s = sigmoid(x), value = x * s;
    return {value, s + value - value * s};
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
