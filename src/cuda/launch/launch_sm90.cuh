// Launching the persistent sm_90a kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/launch/launch.h"
#include "cuda/launch/tensor_map.h"
#include "cuda/tile/gathered_rows.cuh"
#include "cuda/tile/result.cuh"
#include "dropless/status.h"

namespace dropless::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status(StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error));
}

// A result that is stored without the copy engine: its map stays unset.
inline void set_result(const MatrixStack& stack, ResultMatrix* result) {
  result->data = static_cast<uint8_t*>(const_cast<void*>(stack.data));
  result->row_bytes = stack.row_bytes;
  result->plane_bytes = stack.plane_bytes;
  result->cols = static_cast<int>(stack.cols);
}

inline Status make_result(const MatrixStack& stack, const char* name, ResultMatrix* result,
                          int box_bytes = 128) {
  set_result(stack, result);
  return encode_tensor_map(stack, kChunk, name, &result->map, box_bytes);
}

// Rows of `matrix` [T, width] in the order of the groups: row r is that of token slot_of_row[r] /
// experts_per_token.
inline Status make_row_source(ConstTensor matrix, int64_t width, ConstTensor slot_of_row,
                              int64_t experts_per_token, const char* name, RowSource* source) {
  const int64_t tokens = matrix.dims[0], row_bytes = width * size_of(matrix.dtype);
  DROPLESS_RETURN_IF_ERROR(
      check_tma(dense_stack(matrix.data, matrix.dtype, 1, tokens, width), name));
  const int64_t units = tokens * (row_bytes / 16);
  if (units > std::numeric_limits<int32_t>::max()) {
    return Status(StatusCode::kUnimplemented, std::string(name) + " has " + std::to_string(units) +
                                                  " units of 16 bytes, which is not below 2^31");
  }
  source->data = matrix.as<uint8_t>();
  source->map = {slot_of_row.as<int32_t>(), Divisor::of(experts_per_token),
                 static_cast<int>(tokens)};
  source->units = static_cast<uint32_t>(row_bytes / 16);
  return Status();
}

// One block a multiprocessor, fewer if there cannot be as many work items, in clusters of
// `cluster`.
template <class Params>
Status launch_persistent(void (*kernel)(Params), const Params& params, int cluster, int threads,
                         int shared_bytes, int64_t most_items, cudaStream_t stream) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return cuda_status(error, "cudaFuncSetAttribute");
  const DeviceProperties* device = nullptr;
  DROPLESS_RETURN_IF_ERROR(current_device(&device));
  const int64_t clusters = std::min<int64_t>(device->sm_count / cluster, most_items);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::max<int64_t>(clusters, 1) * cluster));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

}  // namespace dropless::cuda
