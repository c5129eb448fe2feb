#include "cuda/launch/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

namespace dropless::cuda {
namespace {

// The driver's encoder, looked up at run time so that the library links against no driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    // 12000: the CUDA version that introduced the function with this signature.
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer,
                                                               12000, cudaEnableDefault, &found);
    const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(pointer) : nullptr;
  }();
  return function;
}

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

}  // namespace

MatrixStack dense_stack(const void* data, DType dtype, int64_t planes, int64_t rows, int64_t cols) {
  const int64_t row_bytes = cols * size_of(dtype);
  return {data, dtype, cols, rows, planes, row_bytes, rows * row_bytes};
}

Status check_tma(const MatrixStack& stack, const char* name) {
  const int64_t align = 16;
  if (reinterpret_cast<uintptr_t>(stack.data) % align != 0) {
    return Status(StatusCode::kUnimplemented,
                  std::string(name) + ": expected a 16-byte-aligned base address, got one at " +
                      std::to_string(reinterpret_cast<uintptr_t>(stack.data) % align) +
                      " bytes past a boundary; the sm80 kernels take such arrays");
  }
  if (stack.row_bytes % align != 0 || stack.plane_bytes % align != 0) {
    return Status(StatusCode::kUnimplemented,
                  std::string(name) + ": expected rows of a multiple of 16 bytes (" +
                      std::to_string(align / size_of(stack.dtype)) + " elements of " +
                      name_of(stack.dtype) + "), got a last dimension of " +
                      std::to_string(stack.cols) + "; the sm80 kernels take such sizes");
  }
  return Status();
}

Status encode_tensor_map(const MatrixStack& stack, int box_rows, const char* name, CUtensorMap* map,
                         int box_bytes) {
  if (Status status = check_tma(stack, name); !status.ok()) return status;
  if (encoder() == nullptr) {
    return Status(StatusCode::kInternal,
                  "the CUDA driver has no cuTensorMapEncodeTiled; version 12.0 or newer is needed");
  }
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(stack.cols),
                               static_cast<cuuint64_t>(stack.rows),
                               static_cast<cuuint64_t>(stack.planes)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stack.row_bytes),
                                 static_cast<cuuint64_t>(stack.plane_bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / size_of(stack.dtype)),
                             static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encoder()(map, map_type(stack.dtype), 3, const_cast<void*>(stack.data), sizes, strides, box,
                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status();
  return Status(StatusCode::kInternal, std::string(name) +
                                           ": cuTensorMapEncodeTiled failed with code " +
                                           std::to_string(static_cast<int>(result)));
}

}  // namespace dropless::cuda
