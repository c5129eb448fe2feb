// The register tile that the AVX-512 micro-kernels share. Unnamed namespace, no standard library:
// see gemm_kernel.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace dropless::cpu {
namespace {

// 12 x 32 floats of C are 24 of the 32 registers. Per step: 24 FMAs take 12 cycles, 2 loads of B
// and 12 broadcasts of A fit beside them.
constexpr int kMr = 12;
constexpr int kNr = 32;

// `Step` says what one step of the contraction is:
//   Element, kDepth                    a panel's element, and how many of the contraction it holds
//   Vector, load(p), broadcast(x)      16 elements of B, one of A in every lane
//   multiply_add(c, a, b)
template <class Step, int kRows>
void multiply_rows(int64_t k, const typename Step::Element* a, const typename Step::Element* b,
                   float* c, int64_t ldc, bool accumulate) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += Step::kDepth, a += kMr, b += kNr) {
    const typename Step::Vector b0 = Step::load(b), b1 = Step::load(b + 16);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      const typename Step::Vector x = Step::broadcast(a[m]);
      acc[m][0] = Step::multiply_add(acc[m][0], x, b0);
      acc[m][1] = Step::multiply_add(acc[m][1], x, b1);
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

template <class Step, int kRows = kMr>
void multiply_some_rows(int rows, int64_t k, const typename Step::Element* a,
                        const typename Step::Element* b, float* c, int64_t ldc, bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return multiply_some_rows<Step, kRows - 1>(rows, k, a, b, c, ldc, accumulate);
    }
  }
  multiply_rows<Step, kRows>(k, a, b, c, ldc, accumulate);
}

// GemmKernel::multiply.
template <class Step>
void multiply(int rows, int64_t k, const void* a, const void* b, float* c, int64_t ldc,
              bool accumulate) {
  using Element = typename Step::Element;
  multiply_some_rows<Step>(rows, k, static_cast<const Element*>(a), static_cast<const Element*>(b),
                           c, ldc, accumulate);
}

}  // namespace
}  // namespace dropless::cpu
