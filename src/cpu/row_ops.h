// Element-wise work around the GEMMs, for the instruction set that the including file is compiled
// for. Unnamed namespace, no standard library: see gemm_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/gemm_kernel.h"
#include "cpu/vector_math.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

// Calls body(offset, count) with count == kLanes, then once with what is left.
template <class Body>
DROPLESS_INLINE void for_vectors(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t{kLanes});
  if (i < n) body(i, n - i);
}

void f32_to_bf16(const float* x, uint16_t* y, int64_t n) {
  for_vectors(n, [=](int64_t i, int64_t c) { put(y + i, narrow_bf16(get<VF>(x + i, c)), c); });
}

void bf16_to_f32(const uint16_t* x, float* y, int64_t n) {
  for_vectors(n, [=](int64_t i, int64_t c) { put(y + i, widen_bf16(get<VH>(x + i, c)), c); });
}

DROPLESS_INLINE VF get_e4m3(const uint8_t* p, int64_t count) {
  return decode_e4m3(__builtin_convertvector(get<VB>(p, count), VU));
}

void e4m3_to_bf16(const uint8_t* x, uint16_t* y, int64_t n) {
  // An e4m3 value has 3 bits of mantissa: its upper half is all of it.
  for_vectors(n, [=](int64_t i, int64_t c) {
    put(y + i, __builtin_convertvector(bits(get_e4m3(x + i, c)) >> 16, VH), c);
  });
}

void e4m3_to_f32(const uint8_t* x, float scale, float* y, int64_t n) {
  for_vectors(n, [=](int64_t i, int64_t c) { put(y + i, get_e4m3(x + i, c) * scale, c); });
}

void add(const float* x, float* y, int64_t n) {
  for_vectors(n,
              [=](int64_t i, int64_t c) { put(y + i, get<VF>(x + i, c) + get<VF>(y + i, c), c); });
}

float dot(const float* x, const float* y, int64_t n) {
  VF total{};
  for_vectors(
      n, [&](int64_t i, int64_t c) { total = fma(get<VF>(x + i, c), get<VF>(y + i, c), total); });
  return sum(total);
}

void add_scaled(const float* t, int64_t ldt, const float* a_scale, const float* b_scale, int rows,
                int cols, float* c, int64_t ldc) {
  for (int m = 0; m < rows; ++m, t += ldt, c += ldc) {
    const VF scale = splat(a_scale[m]);
    for (int n = 0; n < cols; n += kLanes) {
      store(c + n, fma(load<VF>(t + n) * scale, load<VF>(b_scale + n), load<VF>(c + n)));
    }
  }
}

// ---- Gated activations

enum Activation { kSilu = 0, kGelu = 1, kGeluTanh = 2 };  // as ActivationKind

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

template <int kKind>
DROPLESS_INLINE Activated activate(VF z) {
  if constexpr (kKind == kGelu) {
    return gelu(z);
  } else if constexpr (kKind == kSilu) {
    const VF s = sigmoid(z);
    return {z * s, s * fma(z, 1.0f - s, 1.0f)};
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

template <int kKind>
void glu_forward_as(const GluForwardRow& row) {
  for_vectors(row.n, [&](int64_t i, int64_t c) {
    VF g = get<VF>(row.gate + i, c), u = get<VF>(row.up + i, c);
    if (row.gate_bias != nullptr) g += get<VF>(row.gate_bias + i, c);
    if (row.up_bias != nullptr) u += get<VF>(row.up_bias + i, c);
    put(row.h_gate + i, g, c);
    put(row.h_up + i, u, c);
    if (row.round_bf16) {
      g = round_bf16(g);
      u = round_bf16(u);
    }
    put(row.a + i, activate<kKind>(g).value * u, c);
  });
}

void glu_forward(const GluForwardRow& row) {
  if (row.activation == kSilu) return glu_forward_as<kSilu>(row);
  if (row.activation == kGelu) return glu_forward_as<kGelu>(row);
  glu_forward_as<kGeluTanh>(row);
}

template <int kKind>
float glu_backward_as(const GluBackwardRow& row) {
  VF total{};
  for_vectors(row.n, [&](int64_t i, int64_t c) {
    const VF d_raw = get<VF>(row.d_a + i, c), u = get<VF>(row.h_up + i, c);
    const Activated act = activate<kKind>(get<VF>(row.h_gate + i, c));
    const VF a = act.value * u;
    const VF d_a = d_raw * row.weight;
    total = fma(d_raw, a, total);  // lanes past the row's end are 0 * (act(0) * 0)
    put(row.dh_gate + i, d_a * u * act.slope, c);
    put(row.dh_up + i, d_a * act.value, c);
    put(row.pa + i, a * row.weight, c);
  });
  return sum(total);
}

float glu_backward(const GluBackwardRow& row) {
  if (row.activation == kSilu) return glu_backward_as<kSilu>(row);
  if (row.activation == kGelu) return glu_backward_as<kGelu>(row);
  return glu_backward_as<kGeluTanh>(row);
}

// ---- FP8

DROPLESS_INLINE VF finite_magnitude(VF x) {
  const VF magnitude = abs(x);
  return bits(magnitude) < 0x7f800000u ? magnitude : VF{};
}

float finite_amax(const float* x, int64_t n) {
  VF best{};
  for_vectors(n,
              [&](int64_t i, int64_t c) { best = max(best, finite_magnitude(get<VF>(x + i, c))); });
  return largest(best);
}

void quantize(const float* x, float inverse_scale, uint8_t* q, int64_t n) {
  for_vectors(n, [=](int64_t i, int64_t c) {
    const VF v = get<VF>(x + i, c);
    // An infinity times a subnormal 1/scale stays one, so the code is NaN as the rules ask.
    put(q + i, __builtin_convertvector(encode_e4m3(v * inverse_scale), VB), c);
  });
}

void finite_amax_columns(const float* x, int64_t ld, int64_t rows, int64_t n, float* amax) {
  for_vectors(n, [=](int64_t i, int64_t c) {
    VF best{};
    for (int64_t r = 0; r < rows; ++r)
      best = max(best, finite_magnitude(get<VF>(x + r * ld + i, c)));
    put(amax + i, best, c);
  });
}

void quantize_columns_to_bf16(const float* x, const float* inverse_scale, uint16_t* y, int64_t n) {
  for_vectors(n, [=](int64_t i, int64_t c) {
    const VF v = get<VF>(x + i, c) * get<VF>(inverse_scale + i, c);
    put(y + i, __builtin_convertvector(bits(decode_e4m3(encode_e4m3(v))) >> 16, VH), c);
  });
}

constexpr RowOps kRowOps = {
    f32_to_bf16,
    bf16_to_f32,
    e4m3_to_bf16,
    e4m3_to_f32,
    add,
    dot,
    add_scaled,
    glu_forward,
    glu_backward,
    finite_amax,
    quantize,
    finite_amax_columns,
    quantize_columns_to_bf16,
};

}  // namespace
}  // namespace dropless::cpu

#pragma GCC diagnostic pop
