// One unit of A from its pre-activations, and its gradient, for any ActivationOptions; the formulas
// are those of reference/activation.h.
#pragma once

#include "cuda/tile/activation.cuh"
#include "dropless/experts.h"

namespace dropless::cuda {

struct GluValue {
  float a;
  float d_gate;
  float d_up;
};

template <bool kPrecise>
__device__ __forceinline__ ActivationValue activate_any(const ActivationOptions& options, float z) {
  switch (options.kind) {
    case ActivationKind::kSilu: {
      const float s = sigmoid<kPrecise>(options.slope * z);
      return {z * s, s + options.slope * z * s * (1.0f - s)};
    }
    case ActivationKind::kGelu:
      return activate_with_derivative<ActivationKind::kGelu, kPrecise>(z);
    case ActivationKind::kGeluTanh:
      return activate_with_derivative<ActivationKind::kGeluTanh, kPrecise>(z);
    case ActivationKind::kRelu:
      return {z < 0.0f ? 0.0f : z, z > 0.0f ? 1.0f : 0.0f};
    case ActivationKind::kReluSquared:
      return {z < 0.0f ? 0.0f : z * z, z < 0.0f ? 0.0f : 2.0f * z};
  }
  return {0.0f, 0.0f};
}

// kPlainSilu: gated SiLU without limits, what most models have. `up` is not used if not gated.
template <bool kPlainSilu, bool kPrecise>
__device__ __forceinline__ GluValue glu(const ActivationOptions& options, float gate, float up) {
  if constexpr (kPlainSilu) {
    const ActivationValue act = activate_with_derivative<ActivationKind::kSilu, kPrecise>(gate);
    return {act.value * up, act.derivative * up, act.value};
  } else {
    const bool gate_passes = !(gate > options.gate_limit);
    const ActivationValue act =
        activate_any<kPrecise>(options, gate_passes ? gate : options.gate_limit);
    const float slope = gate_passes ? act.derivative : 0.0f;
    if (!options.gated) return {act.value, slope, 0.0f};
    const bool up_passes = !(fabsf(up) > options.up_limit);
    const float factor = (up_passes ? up : copysignf(options.up_limit, up)) + options.up_offset;
    return {act.value * factor, slope * factor, up_passes ? act.value : 0.0f};
  }
}

// Calls function.template operator()<kPlainSilu>(): a uniform choice, outside of every loop.
template <class Function>
__device__ __forceinline__ void with_activation(const ActivationOptions& options,
                                                const Function& function) {
  const bool plain = options.gated && options.slope == 1.0f && options.gate_limit == kNoLimit &&
                     options.up_limit == kNoLimit && options.up_offset == 0.0f;
  if (plain && options.kind == ActivationKind::kSilu) {
    function.template operator()<true>();
  } else {
    function.template operator()<false>();
  }
}

}  // namespace dropless::cuda
