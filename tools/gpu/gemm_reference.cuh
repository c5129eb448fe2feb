// Plain fp32 versions of the grouped products, one thread an element, and the inputs they share
// with the checks.
#pragma once

#include "dropless/cuda.h"
#include "harness.cuh"

namespace harness {

using namespace dropless;

inline int expert_of_host(const std::vector<int32_t>& offsets, int row) {
  if (row < offsets.front() || row >= offsets.back()) return -1;
  return static_cast<int>(std::upper_bound(offsets.begin(), offsets.end(), row) - offsets.begin()) -
         1;
}

// One thread an element. rhs is [E, Kc, N], or [E, N, Kc].
__global__ void reference_gemm_kernel(const __nv_bfloat16* lhs, const __nv_bfloat16* rhs,
                                      const int* expert_of_row, const float* bias, float* out,
                                      int64_t rows, int contraction, int cols, bool transposed) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= rows * cols) return;
  const int64_t row = i / cols;
  const int col = static_cast<int>(i % cols);
  const int expert = expert_of_row[row];
  float sum = 0;
  if (expert >= 0) {
    const __nv_bfloat16* matrix = rhs + static_cast<int64_t>(expert) * contraction * cols;
    for (int k = 0; k < contraction; ++k) {
      sum += static_cast<float>(lhs[row * contraction + k]) *
             static_cast<float>(transposed ? matrix[static_cast<int64_t>(col) * contraction + k]
                                           : matrix[static_cast<int64_t>(k) * cols + col]);
    }
    if (bias != nullptr) sum += bias[static_cast<int64_t>(expert) * cols + col];
  }
  out[i] = sum;
}

// One thread an element of dw [E, rows, cols]: sum over the group's rows of x[r, row] * dy[r,
// plane, col].
__global__ void reference_wgrad_kernel(const __nv_bfloat16* x, const __nv_bfloat16* dy,
                                       const int* offsets, float* dw, int experts, int rows,
                                       int cols, int planes, int plane) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<int64_t>(experts) * rows * cols) return;
  const int col = static_cast<int>(i % cols);
  const int64_t row = i / cols % rows, expert = i / cols / rows;
  float sum = 0;
  for (int64_t r = offsets[expert]; r < offsets[expert + 1]; ++r) {
    sum += static_cast<float>(x[r * rows + row]) *
           static_cast<float>(dy[(r * planes + plane) * cols + col]);
  }
  dw[i] = sum;
}

inline Array expert_of_rows(const std::vector<int32_t>& offsets, int64_t rows) {
  std::vector<int> host(rows);
  for (int64_t r = 0; r < rows; ++r) host[r] = expert_of_host(offsets, static_cast<int>(r));
  Array array(DType::kI32, {rows});
  array.upload(host);
  return array;
}

// Makes the rows of no group NaN: they must never be read.
inline void poison_outside(const Array& array, const std::vector<int32_t>& offsets) {
  const int64_t rows = array.tensor().dims[0], row_bytes = array.tensor().bytes() / rows;
  HARNESS_CUDA(cudaMemset(array.as<uint8_t>(), 0xFF, offsets.front() * row_bytes));
  HARNESS_CUDA(cudaMemset(array.as<uint8_t>() + offsets.back() * row_bytes, 0xFF,
                          (rows - offsets.back()) * row_bytes));
}

inline Array device_offsets(const std::vector<int32_t>& offsets) {
  Array array(DType::kI32, {static_cast<int64_t>(offsets.size())});
  array.upload(offsets);
  return array;
}

inline std::vector<float> reference_gemm(const Array& lhs, const Array& rhs, const Array& map,
                                         const float* bias, bool transposed) {
  const int64_t rows = lhs.tensor().dims[0];
  const int contraction = static_cast<int>(rhs.tensor().dims[transposed ? 2 : 1]);
  const int cols = static_cast<int>(rhs.tensor().dims[transposed ? 1 : 2]);
  Array want(DType::kF32, {rows, cols});
  reference_gemm_kernel<<<(rows * cols + 255) / 256, 256>>>(
      lhs.as<__nv_bfloat16>(), rhs.as<__nv_bfloat16>(), map.as<int>(), bias, want.as<float>(), rows,
      contraction, cols, transposed);
  HARNESS_CUDA(cudaGetLastError());
  return floats(want);
}

struct Case {
  std::string name;
  std::vector<int32_t> offsets;
  int64_t rows;
  int contraction, cols;
};

inline int64_t experts_of(const Case& c) { return static_cast<int64_t>(c.offsets.size()) - 1; }

// Rows that lie in token order, and the same in the order of the groups. Tokens that no row of a
// group needs are NaN: they must never be read.
struct TokenRows {
  Array tokens;                   // [T, planes, width] bf16
  Array slots;                    // [M] int32, -1 for rows of no group
  Array rows;                     // [M, planes, width] bf16
  std::vector<int> slot_of_row;   // as slots
  int64_t experts_per_token = 1;  // K
};

inline TokenRows token_rows(const Case& c, int experts_per_token, int64_t planes, int64_t width,
                            uint64_t seed) {
  const int64_t tokens = ceil_div(c.rows, experts_per_token);
  std::vector<int> slots(tokens * experts_per_token);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int>(i);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  slots.resize(c.rows);
  std::vector<bool> needed(tokens);
  for (int64_t r = 0; r < c.rows; ++r) {
    if (r < c.offsets.front() || r >= c.offsets.back()) slots[r] = -1;
    if (slots[r] >= 0) needed[slots[r] / experts_per_token] = true;
  }
  TokenRows t{normal(DType::kBF16, {tokens, planes, width}, seed), Array(DType::kI32, {c.rows}),
              Array(DType::kBF16, {c.rows, planes, width}), slots, experts_per_token};
  t.slots.upload(slots);
  const int64_t row_bytes = planes * width * 2;
  for (int64_t i = 0; i < tokens; ++i) {
    if (!needed[i])
      HARNESS_CUDA(cudaMemset(t.tokens.as<uint8_t>() + i * row_bytes, 0xFF, row_bytes));
  }
  PermuteArgs permutation;
  permutation.x = ConstTensor{t.tokens.as<void>(), DType::kBF16, 2, {tokens, planes * width, 0, 0}};
  permutation.slot_of_row = t.slots;
  permutation.experts_per_token = experts_per_token;
  permutation.rows = Tensor{t.rows.as<void>(), DType::kBF16, 2, {c.rows, planes * width, 0, 0}};
  require(cuda::permute(permutation, Tensor(), nullptr));
  return t;
}

// [T, width] of a stack of one plane.
inline ConstTensor matrix(const Array& stack) {
  const Tensor t = stack.tensor();
  return ConstTensor{t.data, t.dtype, 2, {t.dims[0], t.dims[1] * t.dims[2], 0, 0}};
}

}  // namespace harness
