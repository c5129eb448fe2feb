// The micro-kernel for AVX-512 in float32.
#if defined(__x86_64__)

// GCC 12 takes the intrinsics' "undefined" operands for uninitialised ones.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cpu/gemm_kernel.h"
#include "cpu/pack_f32.h"
#include "cpu/row_ops.h"

namespace dropless::cpu {
namespace {

// 12 x 32 floats of C are 24 of the 32 registers. Per step of k: 24 FMAs take 12 cycles, 2 loads of
// B and 12 broadcasts of A fit beside them.
constexpr int kMr = 12;
constexpr int kNr = 32;

template <int kRows>
void multiply_rows(int64_t k, const float* a, const float* b, float* c, int64_t ldc,
                   bool accumulate) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i, a += kMr, b += kNr) {
    const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      const __m512 x = _mm512_set1_ps(a[m]);
      acc[m][0] = _mm512_fmadd_ps(x, b0, acc[m][0]);
      acc[m][1] = _mm512_fmadd_ps(x, b1, acc[m][1]);
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
void dispatch(int rows, int64_t k, const float* a, const float* b, float* c, int64_t ldc,
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
  dispatch<kMr>(rows, k, static_cast<const float*>(a), static_cast<const float*>(b), c, ldc,
                accumulate);
}

}  // namespace

const GemmKernel kAvx512F32Kernel = make_f32_kernel<kMr, kNr, F32Source>("avx512", multiply);
const GemmKernel kAvx512Bf16Kernel = make_f32_kernel<kMr, kNr, Bf16Source>("avx512", multiply);
const RowOps kAvx512RowOps = kRowOps;

}  // namespace dropless::cpu

#endif
