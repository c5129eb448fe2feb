// One unit of A from its pre-activations, and its gradient, for any ActivationOptions; the formulas
// are those of reference/activation.h.
#pragma once

#include "cuda/tile/activation.cuh"
#include "dropless/experts.h"

namespace dropless::cuda {

// The epilogues of sm_90 that are compiled.
enum class GluForm {
  kSilu,         // gated SiLU and nothing else, what most models have
  kSiluLimited,  // gated SiLU with slope, limits, offset (gpt-oss): no branches either
  kGated,        // any other gated one
  kUngated,      // any without a gate
};

inline GluForm glu_form(const ActivationOptions& options) {
  if (!options.gated) return GluForm::kUngated;
  if (options.kind != ActivationKind::kSilu) return GluForm::kGated;
  return options.plain() ? GluForm::kSilu : GluForm::kSiluLimited;
}

struct GluValue {
  float a;
  float d_gate;
  float d_up;
};

// act(z) of one kind, with the sigmoid's slope.
template <ActivationKind kKind, bool kPrecise>
__device__ __forceinline__ ActivationValue activate_sloped(const ActivationOptions& options,
                                                           float z) {
  if constexpr (kKind == ActivationKind::kSilu) {
    const float s = sigmoid<kPrecise>(options.slope * z);
    return {z * s, s + options.slope * z * s * (1.0f - s)};
  } else if constexpr (kKind == ActivationKind::kRelu) {
    return {z < 0.0f ? 0.0f : z, z > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (kKind == ActivationKind::kReluSquared) {
    return {z < 0.0f ? 0.0f : z * z, z < 0.0f ? 0.0f : 2.0f * z};
  } else {
    return activate_with_derivative<kKind, kPrecise>(z);
  }
}

// Calls function.template operator()<kKind>(): a uniform choice, outside of every loop.
template <class Function>
__device__ __forceinline__ void with_kind(ActivationKind kind, const Function& function) {
  switch (kind) {
    case ActivationKind::kSilu:
      return function.template operator()<ActivationKind::kSilu>();
    case ActivationKind::kGelu:
      return function.template operator()<ActivationKind::kGelu>();
    case ActivationKind::kGeluTanh:
      return function.template operator()<ActivationKind::kGeluTanh>();
    case ActivationKind::kRelu:
      return function.template operator()<ActivationKind::kRelu>();
    case ActivationKind::kReluSquared:
      return function.template operator()<ActivationKind::kReluSquared>();
  }
}

template <bool kPrecise>
__device__ __forceinline__ ActivationValue activate_any(const ActivationOptions& options, float z) {
  ActivationValue value = {0.0f, 0.0f};
  with_kind(options.kind,
            [&]<ActivationKind kKind>() { value = activate_sloped<kKind, kPrecise>(options, z); });
  return value;
}

// One unit with limits, from act() of its cut gate.
template <bool kGated, class Activate>
__device__ __forceinline__ GluValue glu_limited(const ActivationOptions& options, float gate,
                                                float up, const Activate& activate) {
  const bool gate_passes = !(gate > options.gate_limit);
  const ActivationValue act = activate(gate_passes ? gate : options.gate_limit);
  const float slope = gate_passes ? act.derivative : 0.0f;
  if constexpr (!kGated) {
    return {act.value, slope, 0.0f};
  } else {
    const bool up_passes = !(fabsf(up) > options.up_limit);
    const float factor = (up_passes ? up : copysignf(options.up_limit, up)) + options.up_offset;
    return {act.value * factor, slope * factor, up_passes ? act.value : 0.0f};
  }
}

// kPlainSilu: gated SiLU without limits, what most models have. `up` is not used if not gated.
template <bool kPlainSilu, bool kPrecise>
__device__ __forceinline__ GluValue glu(const ActivationOptions& options, float gate, float up) {
  if constexpr (kPlainSilu) {
    const ActivationValue act = activate_with_derivative<ActivationKind::kSilu, kPrecise>(gate);
    return {act.value * up, act.derivative * up, act.value};
  } else {
    const auto activate = [&](float z) { return activate_any<kPrecise>(options, z); };
    return options.gated ? glu_limited<true>(options, gate, up, activate)
                         : glu_limited<false>(options, gate, up, activate);
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

// What an epilogue is compiled for: one template argument instead of a branch an element.
template <GluForm kForm>
struct Glu {
  static constexpr bool kGated = kForm != GluForm::kUngated;
  static constexpr int kParts = kGated ? 2 : 1;

  // Calls function(value), value(gate, up) being the unit of these options: once for many elements.
  template <class Function>
  __device__ static __forceinline__ void with(const ActivationOptions& options,
                                              const Function& function) {
    if constexpr (kForm == GluForm::kSilu) {
      function([&](float gate, float up) { return glu<true, false>(options, gate, up); });
    } else if constexpr (kForm == GluForm::kSiluLimited) {
      function(
          [&](float gate, float up) { return limited<ActivationKind::kSilu>(options, gate, up); });
    } else {
      with_kind(options.kind, [&]<ActivationKind kKind>() {
        function([&](float gate, float up) { return limited<kKind>(options, gate, up); });
      });
    }
  }

 private:
  template <ActivationKind kKind>
  __device__ static __forceinline__ GluValue limited(const ActivationOptions& options, float gate,
                                                     float up) {
    return glu_limited<kGated>(options, gate, up,
                               [&](float z) { return activate_sloped<kKind, false>(options, z); });
  }
};

}  // namespace dropless::cuda
