// What every launch function needs around its kernel: the device's properties, and errors as
// Status.
#pragma once

#include <cstdint>

#include "dropless/cuda.h"

// Leaves the function with the Status of `expression` unless it is ok.
#define DROPLESS_RETURN_IF_ERROR(expression) \
  if (::dropless::Status status_ = (expression); !status_.ok()) return status_

namespace dropless::cuda {

struct DeviceProperties {
  int sm_count = 0;
  int compute_capability = 0;  // 10 * major + minor
  int max_shared_bytes = 0;    // a block may opt in to this much
  int64_t l2_bytes = 0;
  double bandwidth_bytes = 0;  // device memory, bytes per second, by its clock and bus width
};

// Properties of the current device, read from it once per device and process. `device` is set on
// success.
Status current_device(const DeviceProperties** device);

// The error of the last launch, as "<op>: <what CUDA says>". Clears it.
Status launch_status(const char* op);

// InvalidArgument unless `workspace` has `bytes` bytes at a multiple of `alignment`.
Status check_workspace(const char* op, const Tensor& workspace, int64_t bytes, int64_t alignment);

inline bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace dropless::cuda
