// The micro-kernel for AVX2 with FMA.
#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/gemm_kernel.h"
#include "cpu/pack_f32.h"
#include "cpu/row_ops.h"

namespace dropless::cpu {
namespace {

// 6 x 16 floats of C are 12 of the 16 registers; two more hold a row of B, one an element of A. 12
// independent chains also cover the FMA's latency of 4 at two a cycle.
constexpr int kMr = 6;
constexpr int kNr = 16;

template <int kRows>
void multiply_rows(int64_t k, const float* a, const float* b, float* c, int64_t ldc,
                   bool accumulate) {
  // Every loop over the accumulators is unrolled: one that is not keeps them in memory.
  __m256 acc[kRows][2];
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
  for (int64_t i = 0; i < k; ++i, a += kMr, b += kNr) {
    const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
    for (int m = 0; m < kRows; ++m) {
      const __m256 x = _mm256_broadcast_ss(a + m);
      acc[m][0] = _mm256_fmadd_ps(x, b0, acc[m][0]);
      acc[m][1] = _mm256_fmadd_ps(x, b1, acc[m][1]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m, c += ldc) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256 old = accumulate ? _mm256_loadu_ps(c + v * 8) : _mm256_setzero_ps();
      _mm256_storeu_ps(c + v * 8, accumulate ? _mm256_add_ps(old, acc[m][v]) : acc[m][v]);
    }
  }
}

void multiply(int rows, int64_t k, const void* a, const void* b, float* c, int64_t ldc,
              bool accumulate) {
  const auto* pa = static_cast<const float*>(a);
  const auto* pb = static_cast<const float*>(b);
  switch (rows) {
    case 1:
      return multiply_rows<1>(k, pa, pb, c, ldc, accumulate);
    case 2:
      return multiply_rows<2>(k, pa, pb, c, ldc, accumulate);
    case 3:
      return multiply_rows<3>(k, pa, pb, c, ldc, accumulate);
    case 4:
      return multiply_rows<4>(k, pa, pb, c, ldc, accumulate);
    case 5:
      return multiply_rows<5>(k, pa, pb, c, ldc, accumulate);
    default:
      return multiply_rows<6>(k, pa, pb, c, ldc, accumulate);
  }
}

}  // namespace

const GemmKernel kAvx2F32Kernel = make_f32_kernel<kMr, kNr, F32Source>("avx2", multiply);
const GemmKernel kAvx2Bf16Kernel = make_f32_kernel<kMr, kNr, Bf16Source>("avx2", multiply);
const RowOps kAvx2RowOps = kRowOps;

}  // namespace dropless::cpu

#endif
