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
// spend instructions on ranges that do not occur here, and a tile has 128  * 128 of them. Where
// results stay float32, kPrecise takes them.
template <bool kPrecise = false>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (kPrecise) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    constexpr float kMinusLog2E = -1.44269504f;
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(kMinusLog2E * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
  }
}

struct ActivationValue {
  float value;       // act(x)
  float derivative;  // act'(x)
};

template <ActivationKind kKind, bool kPrecise = false>
__device__ __forceinline__ ActivationValue activate_with_derivative(float x) {
  if constexpr (kKind == ActivationKind::kSilu) {
    const float s = sigmoid<kPrecise>(x), value = x * s;
    return {value, s + value - value * s};
  } else if constexpr (kKind == ActivationKind::kGelu) {
    constexpr float kInvSqrt2 = 0.70710678f, kInvSqrt2Pi = 0.39894228f;
    const float exponent = -0.5f * x * x;
    const float phi = 0.5f * erfcf(-x * kInvSqrt2);  // 1 + erf would cancel
    return {x * phi, phi + x * kInvSqrt2Pi * (kPrecise ? expf(exponent) : __expf(exponent))};
  } else {
    constexpr float kSqrt2OverPi = 0.79788456f, kCubic = 0.044715f;
    const float inner = kSqrt2OverPi * (x + kCubic * x * x * x);
    const float s = sigmoid<kPrecise>(2.0f * inner);  // (1 + tanh(inner)) / 2
    const float slope = kSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    return {x * s, s + 2.0f * x * s * (1.0f - s) * slope};
  }
}

template <ActivationKind kKind, bool kPrecise = false>
__device__ __forceinline__ float activate(float x) {
  return activate_with_derivative<kKind, kPrecise>(x).value;
}

// What the experts put between their products.
template <ActivationKind kKind>
__device__ __forceinline__ float gated(float gate, float up) {
  return activate<kKind>(gate) * up;
}

}  // namespace dropless::cuda
