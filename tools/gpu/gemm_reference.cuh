// Plain fp32 versions of the grouped products, one thread an element, and the inputs they share
// with the checks.
#pragma once

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

}  // namespace harness
