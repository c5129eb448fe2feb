// Square transposes in registers: kLanes vectors of kLanes dwords become their own columns. Every
// loop is unrolled: one that is not keeps its vectors in memory. Unnamed namespace, no standard
// library: see gemm_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/vector_math.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

#if defined(__AVX512F__)

// Shuffles move twice as far in each of four rounds: dwords, pairs of them, 128-bit lanes, pairs of
// lanes.
inline void transpose_16x16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i + 0] = _mm512_unpacklo_epi64(t[i + 0], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i + 0], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4g + c] holds, in 128-bit lane l, column 4l + c of rows 4g .. 4g + 3.
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    t[c + 0] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);       // lanes 0, 2 of groups 0 and 1
    t[c + 4] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd);       // lanes 1, 3
    t[c + 8] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);  // groups 2 and 3
    t[c + 12] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    r[c + 0] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0x88);
    r[c + 8] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0xdd);
    r[c + 4] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0x88);
    r[c + 12] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0xdd);
  }
}

DROPLESS_INLINE void transpose(VF v[kLanes]) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = (__m512i)v[i];
  transpose_16x16(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = (VF)r[i];
}

#elif defined(__AVX2__)

DROPLESS_INLINE void transpose(VF v[kLanes]) {
  __m256 r[8], t[8];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) r[i] = (__m256)v[i];
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 4) {
    r[i + 0] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    v[i] = (VF)_mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    v[i + 4] = (VF)_mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}

#else

DROPLESS_INLINE void transpose(VF v[kLanes]) {
  // __builtin_shufflevector is what both GCC (12 on) and Clang have.
  const auto low = [](VF x, VF y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5); };
  const auto high = [](VF x, VF y) { return __builtin_shufflevector(x, y, 2, 6, 3, 7); };
  const VF a = low(v[0], v[2]), b = low(v[1], v[3]);
  const VF c = high(v[0], v[2]), d = high(v[1], v[3]);
  v[0] = low(a, b);
  v[1] = high(a, b);
  v[2] = low(c, d);
  v[3] = high(c, d);
}

#endif

}  // namespace
}  // namespace dropless::cpu

#pragma GCC diagnostic pop
