// Element-wise work around the GEMMs, for the instruction set that the including file is compiled
// for. Unnamed namespace, no standard library: see gemm_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/gemm_kernel.h"
#include "cpu/glu_ops.h"
#include "cpu/vector_math.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

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
