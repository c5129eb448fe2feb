// The micro-kernel for AVX-512 with bfloat16 dot products.
#if defined(__x86_64__)

// GCC 12 takes the intrinsics' "undefined" operands for uninitialised ones.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cpu/gemm_kernel.h"
#include "cpu/pack_pairs_avx512.h"

namespace dropless::cpu {
namespace {

// As in float32 (gemm_kernel_avx512.cc), with a pair of bfloat16 where that has a float.
constexpr int kMr = 12;
constexpr int kNr = 32;

// Dword [p][w] of the panel is the pair (2p, 2p + 1) of row (column) w; see pack_pairs_avx512.h.
template <int kWidth, bool kTranspose>
void pack(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  auto* out = static_cast<uint32_t*>(panel);
  for (int64_t k0 = 0; k0 < k; k0 += 32, out += 16 * kWidth) {
    const int64_t depth = k - k0 < 32 ? k - k0 : 32;
    for (int w0 = 0; w0 < kWidth; w0 += 16) {
      const int width = count - w0 < 0 ? 0 : (count - w0 < 16 ? count - w0 : 16);
      __m512i r[16];
      if (kTranspose && width == 16 && depth == 32) {
        load_transposed_pairs(rows + w0, offset + k0, r);
      } else if constexpr (kTranspose) {
        load_pair_rows(rows + (width > 0 ? w0 : 0), offset + k0, width, depth, r);
        transpose_16x16(r);
      } else {
        load_pair_columns(rows + k0, offset + w0, width, depth, r);
      }
      const __mmask16 mask = first_words16(kWidth - w0);
      for (int64_t p = 0; 2 * p < depth; ++p) {
        _mm512_mask_storeu_epi32(out + p * kWidth + w0, mask, r[p]);
      }
    }
  }
}

template <int kRows>
void multiply_rows(int64_t k, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
                   bool accumulate) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2, a += kMr, b += kNr) {
    const auto b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      const auto x = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[m]));
      acc[m][0] = _mm512_dpbf16_ps(acc[m][0], x, b0);
      acc[m][1] = _mm512_dpbf16_ps(acc[m][1], x, b1);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m, c += ldc) {
    for (int v = 0; v < 2; ++v) {
      const __m512 sum =
          accumulate ? _mm512_add_ps(_mm512_loadu_ps(c + v * 16), acc[m][v]) : acc[m][v];
      _mm512_storeu_ps(c + v * 16, sum);
    }
  }
}

template <int kRows>
void dispatch(int rows, int64_t k, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc,
              bool accumulate) {
  if constexpr (kRows == 1) {
    multiply_rows<1>(k, a, b, c, ldc, accumulate);
  } else if (rows >= kRows) {
    multiply_rows<kRows>(k, a, b, c, ldc, accumulate);
  } else {
    dispatch<kRows - 1>(rows, k, a, b, c, ldc, accumulate);
  }
}

void multiply(int rows, int64_t k, const void* a, const void* b, float* c, int64_t ldc,
              bool accumulate) {
  dispatch<kMr>(rows, k, static_cast<const uint32_t*>(a), static_cast<const uint32_t*>(b), c, ldc,
                accumulate);
}

// 256 columns of B over this depth are 1 MiB, half of a second-level cache.
constexpr int64_t kKBlock = 2048;

}  // namespace

const GemmKernel kAvx512DotBf16Kernel = {"avx512_bf16",
                                         kMr,
                                         kNr,
                                         2,
                                         kKBlock,
                                         2,
                                         true,
                                         pack<kMr, true>,
                                         pack<kMr, false>,
                                         pack<kNr, false>,
                                         pack<kNr, true>,
                                         nullptr,
                                         nullptr,
                                         multiply};

}  // namespace dropless::cpu

#endif
