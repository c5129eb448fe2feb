// Packing for the micro-kernels that multiply pairs of bfloat16: a dword holds elements 2i and 2i + 1 of
// the contraction. Included by files built for AVX-512; unnamed namespace, no standard library (see
// gemm_kernel.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/transpose.h"

namespace dropless::cpu {
namespace {

inline __mmask32 first_words(int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }
inline __mmask16 first_words16(int64_t n) {
  return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1);
}

inline const uint16_t* words(const void* row, int64_t offset) {
  return static_cast<const uint16_t*>(row) + offset;
}

// Sixteen dwords, dword i = (even[i], odd[i]).
inline __m512i interleave(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Dword p of row w, p < 16, is the pair (k + 2p, k + 2p + 1) of rows[w]; zeros past `depth` and `count`.
inline void load_pair_rows(const void* const* rows, int64_t offset, int count, int64_t depth,
                           __m512i r[16]) {
  const __mmask32 mask = first_words(depth);
  for (int w = 0; w < 16; ++w) {
    r[w] = w < count ? _mm512_maskz_loadu_epi16(mask, words(rows[w], offset)) : _mm512_setzero_si512();
  }
}

// Dword w of row p is the pair (rows[2p][w], rows[2p + 1][w]), p < 16; zeros past `depth` and `count`.
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
