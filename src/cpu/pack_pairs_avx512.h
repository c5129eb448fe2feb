// Packing for the micro-kernels that multiply pairs of bfloat16: a dword holds elements 2i and 2i +
// 1 of the contraction. Included by files built for AVX-512; unnamed namespace, no standard library
// (see gemm_kernel.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/transpose.h"

namespace dropless::cpu {
namespace {

inline __mmask32 first_words(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}
inline __mmask16 first_words16(int64_t n) {
  return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1);
}

inline const uint16_t* words(const void* row, int64_t offset) {
  return static_cast<const uint16_t*>(row) + offset;
}

// Sixteen dwords, dword i = (even[i], odd[i]).
inline __m512i interleave(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Thirty-two columns of two rows: dword i of `low` is (even[i], odd[i]), of `high` the same 16
// further on.
inline void interleave_32(const uint16_t* even, const uint16_t* odd, __m512i* low, __m512i* high) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  *low = _mm512_permutex2var_epi16(a, first, b);
  *high = _mm512_permutex2var_epi16(a, second, b);
}

// The pairs of 16 whole rows of 32 words, transposed: dword w of r[p] is pair p of rows[w]. The
// last two rounds of a transpose, which move 128-bit lanes, are done by loading the lanes where
// they belong.
inline void load_transposed_pairs(const void* const* rows, int64_t offset, __m512i r[16]) {
  for (int lane = 0; lane < 4; ++lane) {  // pairs 4 lane .. 4 lane + 3
    __m512i v[4];
    for (int i = 0; i < 4; ++i) {  // rows i, 4 + i, 8 + i, 12 + i, one a lane
      const auto part = [&](int w) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(words(rows[w], offset + lane * 8)));
      };
      v[i] = _mm512_castsi128_si512(part(i));
      v[i] = _mm512_inserti32x4(v[i], part(4 + i), 1);
      v[i] = _mm512_inserti32x4(v[i], part(8 + i), 2);
      v[i] = _mm512_inserti32x4(v[i], part(12 + i), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    r[lane * 4 + 0] = _mm512_unpacklo_epi64(a, c);
    r[lane * 4 + 1] = _mm512_unpackhi_epi64(a, c);
    r[lane * 4 + 2] = _mm512_unpacklo_epi64(b, d);
    r[lane * 4 + 3] = _mm512_unpackhi_epi64(b, d);
  }
}

// Dword p of row w, p < 16, is the pair (k + 2p, k + 2p + 1) of rows[w]; zeros past `depth` and
// `count`.
inline void load_pair_rows(const void* const* rows, int64_t offset, int count, int64_t depth,
                           __m512i r[16]) {
  const __mmask32 mask = first_words(depth);
  for (int w = 0; w < 16; ++w) {
    r[w] =
        w < count ? _mm512_maskz_loadu_epi16(mask, words(rows[w], offset)) : _mm512_setzero_si512();
  }
}

// Dword w of row p is the pair (rows[2p][w], rows[2p + 1][w]), p < 16; zeros past `depth` and
// `count`.
inline void load_pair_columns(const void* const* rows, int64_t offset, int count, int64_t depth,
                              __m512i r[16]) {
  const __mmask16 mask = first_words16(count);
  const __m256i zero = _mm256_setzero_si256();
  for (int64_t p = 0; p < 16; ++p) {
    const __m256i even =
        2 * p < depth ? _mm256_maskz_loadu_epi16(mask, words(rows[2 * p], offset)) : zero;
    const __m256i odd =
        2 * p + 1 < depth ? _mm256_maskz_loadu_epi16(mask, words(rows[2 * p + 1], offset)) : zero;
    r[p] = interleave(even, odd);
  }
}

}  // namespace
}  // namespace dropless::cpu
