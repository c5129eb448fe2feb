#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "cuda/launch/launch.h"
#include "dropless/sm_limit.h"

namespace dropless::cuda {
namespace {

Status failure(const char* what, cudaError_t error) {
  return Status(StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error));
}

cudaError_t read_properties(int ordinal, DeviceProperties* p) {
  struct Attribute {
    cudaDeviceAttr attribute;
    int value;
  };
  Attribute attributes[] = {
      {cudaDevAttrMultiProcessorCount, 0},
      {cudaDevAttrComputeCapabilityMajor, 0},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 0},
      {cudaDevAttrL2CacheSize, 0},
      {cudaDevAttrMemoryClockRate, 0},
      {cudaDevAttrGlobalMemoryBusWidth, 0},
  };
  for (Attribute& a : attributes) {
    const cudaError_t error = cudaDeviceGetAttribute(&a.value, a.attribute, ordinal);
    if (error != cudaSuccess) return error;
  }
  p->sm_count = attributes[0].value;
  p->compute_capability = 10 * attributes[1].value + attributes[2].value;
  p->max_shared_bytes = attributes[3].value;
  p->l2_bytes = attributes[4].value;
  // The clock is in kHz, and memory transfers twice a clock; the bus width is in bits.
  p->bandwidth_bytes = 2.0 * 1e3 * attributes[5].value * attributes[6].value / 8.0;
  return cudaSuccess;
}

thread_local int sm_limit = 0;  // 0: none

}  // namespace

Status current_device(const DeviceProperties** device) {
  // More devices than any one host has; a larger ordinal is an error, never an overrun.
  constexpr int kMaxDevices = 64;
  static DeviceProperties properties[kMaxDevices];
  static cudaError_t errors[kMaxDevices];
  static std::once_flag read[kMaxDevices];

  int ordinal = 0;
  const cudaError_t error = cudaGetDevice(&ordinal);
  if (error != cudaSuccess) return failure("cudaGetDevice", error);
  if (ordinal >= kMaxDevices) {
    return Status(StatusCode::kUnimplemented, "device ordinal " + std::to_string(ordinal) +
                                                  " is not below " + std::to_string(kMaxDevices));
  }
  std::call_once(read[ordinal],
                 [&] { errors[ordinal] = read_properties(ordinal, &properties[ordinal]); });
  if (errors[ordinal] != cudaSuccess) return failure("cudaDeviceGetAttribute", errors[ordinal]);
  *device = &properties[ordinal];
  if (sm_limit > 0) {
    static thread_local DeviceProperties limited;
    limited = properties[ordinal];
    // No fewer than the largest cluster of blocks.
    limited.sm_count = std::min(std::max(sm_limit, 2), limited.sm_count);
    *device = &limited;
  }
  return Status();
}

SmLimit::SmLimit(int sms) : outer_(sm_limit) { sm_limit = sms; }
SmLimit::~SmLimit() { sm_limit = outer_; }

Status launch_status(const char* op) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status() : failure(op, error);
}

Status check_workspace(const char* op, const Tensor& workspace, int64_t bytes, int64_t alignment) {
  if (workspace.bytes() < bytes) {
    return Status(StatusCode::kInvalidArgument, std::string(op) + ": workspace must have " +
                                                    std::to_string(bytes) + " bytes, but has " +
                                                    std::to_string(workspace.bytes()));
  }
  if (bytes > 0 && !is_aligned(workspace.data, alignment)) {
    return Status(StatusCode::kInvalidArgument, std::string(op) +
                                                    ": workspace must start at a multiple of " +
                                                    std::to_string(alignment) + " bytes");
  }
  return Status();
}

}  // namespace dropless::cuda
