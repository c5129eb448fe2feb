// Launching the persistent sm_90a kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/launch/launch.h"
#include "cuda/launch/tensor_map.h"
#include "cuda/tile/result.cuh"
#include "dropless/status.h"

namespace dropless::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status(StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error));
}

inline Status make_result(const MatrixStack& stack, const char* name, ResultMatrix* result) {
  result->data = static_cast<uint8_t*>(const_cast<void*>(stack.data));
  result->row_bytes = stack.row_bytes;
  result->plane_bytes = stack.plane_bytes;
  result->cols = static_cast<int>(stack.cols);
  return encode_tensor_map(stack, kChunk, name, &result->map);
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
