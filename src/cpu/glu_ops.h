// The experts' activations and their derivatives, for the instruction set that the including file
// is compiled for. Unnamed namespace, no standard library: see gemm_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/gemm_kernel.h"
#include "cpu/vector_math.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

// As ActivationKind.
enum Activation { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kReluSquared = 4 };

struct Activated {
  VF value;
  VF slope;
};

// The cumulative normal distribution and its density by libm; GELU by erf is rare, and its tail
// needs erfc.
DROPLESS_INLINE Activated gelu(VF z) {
  float in[kLanes], value[kLanes], slope[kLanes];
  store(in, z);
  for (int i = 0; i < kLanes; ++i) {
    const float phi = 0.5f * __builtin_erfcf(-in[i] * 0.70710678118654752f);
    const float density = 0.39894228040143268f * __builtin_expf(-0.5f * in[i] * in[i]);
    value[i] = in[i] * phi;
    slope[i] = phi + in[i] * density;
  }
  return {load<VF>(value), load<VF>(slope)};
}

// `alpha` is the slope of SiLU's sigmoid; no other kind reads it.
template <int kKind>
DROPLESS_INLINE Activated activate(VF z, float alpha) {
  if constexpr (kKind == kGelu) {
    return gelu(z);
  } else if constexpr (kKind == kSilu) {
    const VF w = z * alpha, s = sigmoid(w);
    return {z * s, s * fma(w, 1.0f - s, 1.0f)};
  } else if constexpr (kKind == kRelu) {
    const VF zero{};
    return {z < 0.0f ? zero : z, z > 0.0f ? splat(1.0f) : zero};
  } else if constexpr (kKind == kReluSquared) {
    const VF positive = z < 0.0f ? VF{} : z;
    return {positive * positive, positive + positive};
  } else {
    // 0.5 (1 + tanh w) = sigmoid(2 w) with w = sqrt(2 / pi) (z + 0.044715 z^3).
    const VF square = z * z;
    const VF s = sigmoid(
        z * fma(square, splat(2 * 0.79788456080286536f * 0.044715f), 2 * 0.79788456080286536f));
    const VF twice_dw =
        fma(square, splat(6 * 0.79788456080286536f * 0.044715f), 2 * 0.79788456080286536f);
    return {z * s, s * fma(z * (1.0f - s), twice_dw, 1.0f)};
  }
}

// act(g) with its slope, and what multiplies it with its own slope by h_up: 1, or 0 beyond a limit.
struct Glu {
  Activated act;
  VF factor;
  VF factor_slope;
};

// Of plain options nothing but the kind is looked at.
template <int kKind, bool kPlain>
DROPLESS_INLINE Glu glu(const GluOptions& options, VF gate, VF up) {
  if constexpr (kPlain) return {activate<kKind>(gate, 1.0f), up, splat(1.0f)};
  const VF zero{}, one = splat(1.0f);
  const VF highest = splat(options.gate_limit);
  Activated act = activate<kKind>(gate > highest ? highest : gate, options.slope);
  act.slope = gate > highest ? zero : act.slope;
  if (!options.gated) return {act, one, zero};
  const VF limit = splat(options.up_limit);
  VF factor = up > limit ? limit : up;
  factor = up < -limit ? -limit : factor;
  return {act, factor + options.up_offset, abs(up) > limit ? zero : one};
}

template <int kKind, bool kPlain>
void glu_forward_as(const GluForwardRow& row) {
  const bool gated = kPlain || row.options.gated;
  for_vectors(row.n, [&](int64_t i, int64_t c) {
    VF g = get<VF>(row.gate + i, c), u{};
    if (row.gate_bias != nullptr) g += get<VF>(row.gate_bias + i, c);
    put(row.h_gate + i, g, c);
    if (row.round_bf16) g = round_bf16(g);
    if (gated) {
      u = get<VF>(row.up + i, c);
      if (row.up_bias != nullptr) u += get<VF>(row.up_bias + i, c);
      put(row.h_up + i, u, c);
      if (row.round_bf16) u = round_bf16(u);
    }
    const Glu value = glu<kKind, kPlain>(row.options, g, u);
    put(row.a + i, value.act.value * value.factor, c);
  });
}

template <int kKind, bool kPlain>
float glu_backward_as(const GluBackwardRow& row) {
  const bool gated = kPlain || row.options.gated;
  VF total{};
  for_vectors(row.n, [&](int64_t i, int64_t c) {
    const VF d_raw = get<VF>(row.d_a + i, c);  // 0 in lanes past the row's end
    const VF u = gated ? get<VF>(row.h_up + i, c) : VF{};
    const Glu value = glu<kKind, kPlain>(row.options, get<VF>(row.h_gate + i, c), u);
    const VF a = value.act.value * value.factor;
    const VF d_a = d_raw * row.weight;
    total = fma(d_raw, a, total);
    put(row.dh_gate + i, d_a * value.factor * value.act.slope, c);
    if (gated) {
      const VF d_up = d_a * value.act.value;
      put(row.dh_up + i, kPlain ? d_up : d_up * value.factor_slope, c);
    }
    put(row.pa + i, a * row.weight, c);
  });
  return sum(total);
}

// Calls the function of a kind: body.template operator()<kKind, kPlain>().
template <class Body>
DROPLESS_INLINE auto with_kind(const GluOptions& options, Body body) {
  if (options.kind == kSilu) {
    return options.plain ? body.template operator()<kSilu, true>()
                         : body.template operator()<kSilu, false>();
  }
  // The rest is rare enough for one form each.
  if (options.kind == kGelu) return body.template operator()<kGelu, false>();
  if (options.kind == kGeluTanh) return body.template operator()<kGeluTanh, false>();
  if (options.kind == kRelu) return body.template operator()<kRelu, false>();
  return body.template operator()<kReluSquared, false>();
}

void glu_forward(const GluForwardRow& row) {
  with_kind(row.options, [&]<int kKind, bool kPlain>() { glu_forward_as<kKind, kPlain>(row); });
}

float glu_backward(const GluBackwardRow& row) {
  return with_kind(row.options,
                   [&]<int kKind, bool kPlain>() { return glu_backward_as<kKind, kPlain>(row); });
}

}  // namespace
}  // namespace dropless::cpu

#pragma GCC diagnostic pop
