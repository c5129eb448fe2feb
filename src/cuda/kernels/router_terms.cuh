// A float32 number as three bfloat16 terms, where the router's products read them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "core/router_terms.h"

namespace dropless::cuda {

struct TermsOut {
  __nv_bfloat16* terms;  // [R, 3, C]
  __nv_bfloat16* pairs;  // [R, 6, C] or null
};

// Element (row, column) of a matrix with `columns` columns.
template <ProductSide kSide>
__device__ void store_terms(float a, int64_t row, int column, int columns, const TermsOut& out) {
  float term[kTerms];
  router::split_terms(
      a, [](float v) { return __bfloat162float(__float2bfloat16_rn(v)); }, term);
  __nv_bfloat16* terms = out.terms + row * kTerms * columns + column;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) terms[i * columns] = __float2bfloat16_rn(term[i]);
  if (out.pairs == nullptr) return;
  __nv_bfloat16* pairs = out.pairs + row * kTermPairs * columns + column;
#pragma unroll
  for (int i = 0; i < kTermPairs; ++i) {
    pairs[i * columns] = __float2bfloat16_rn(term[router::term_of_pair(kSide, i)]);
  }
}

// A thread an element of a [rows, columns].
template <ProductSide kSide>
__global__ void __launch_bounds__(256)
    router_terms_kernel(const float* a, int64_t rows, int columns, TermsOut out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * columns) return;
  const int64_t row = i / columns;
  store_terms<kSide>(a[i], row, static_cast<int>(i - row * columns), columns, out);
}

}  // namespace dropless::cuda
