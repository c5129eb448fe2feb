// What the products over experts check before they choose a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <string>

#include "cuda/launch/launch.h"
#include "dropless/experts.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless::cuda {

// Workspaces are cut into arrays at multiples of this many bytes.
inline constexpr int64_t kWorkspaceAlignment = 256;

inline int64_t align_workspace(int64_t bytes) {
  return ceil_div(bytes, kWorkspaceAlignment) * kWorkspaceAlignment;
}

// Ok on the GPUs that run the sm_90a kernels, for bfloat16 operands.
inline Status check_sm90_bf16(const char* op, DType dtype) {
  const DeviceProperties* device = nullptr;
  DROPLESS_RETURN_IF_ERROR(current_device(&device));
  if (device->compute_capability != 90) {
    return Status(StatusCode::kUnimplemented,
                  std::string(op) +
                      ": the kernels at hand are for compute capability 9.0, but this"
                      " GPU has " +
                      std::to_string(device->compute_capability / 10) + "." +
                      std::to_string(device->compute_capability % 10));
  }
  if (dtype != DType::kBF16) {
    return Status(StatusCode::kUnimplemented, std::string(op) + ": operands of " + name_of(dtype) +
                                                  " have no kernel on this GPU yet; bfloat16 has");
  }
  return Status();
}

// The epilogues of FP8 are those of gated SiLU and GELU without limits.
inline bool fp8_has_activation(const ActivationOptions& activation) {
  return activation.plain() && activation.kind <= ActivationKind::kGeluTanh;
}

// Tiles count rows and columns in 32 bits; the copy engine takes 32-bit coordinates.
inline Status check_count(const char* op, const char* name, int64_t size) {
  if (size <= std::numeric_limits<int32_t>::max()) return Status();
  return Status(StatusCode::kUnimplemented, std::string(op) + ": " + name + " = " +
                                                std::to_string(size) + " is not below 2^31");
}

inline Status zero_async(const char* op, const Tensor& t, Stream stream) {
  if (t.bytes() > 0) cudaMemsetAsync(t.data, 0, static_cast<size_t>(t.bytes()), stream);
  return launch_status(op);
}

inline ConstTensor bf16_matrix(const void* data, int64_t rows, int64_t cols) {
  return ConstTensor{data, DType::kBF16, 2, {rows, cols, 0, 0}};
}

}  // namespace dropless::cuda
