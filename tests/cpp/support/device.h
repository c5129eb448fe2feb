// Running an operation on the GPU with the arrays of a host test.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "dropless/cuda.h"
#include "tests/cpp/support/array.h"

namespace dropless::testing {

// Copies of host tensors on the device, guarded at both ends by 0xFF bytes as an Array is. With
// DROPLESS_TEST_RAW_WORKSPACE in the environment, scratch is left as cudaMalloc gives it, so that
// compute-sanitizer's initcheck sees what is read before it is written.
class Device {
 public:
  // Every tensor starts `misalignment` bytes past a 256-byte boundary.
  explicit Device(int64_t misalignment = 0) : misalignment_(misalignment) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~Device() {
    for (void* allocation : allocations_) cudaFree(allocation);
    cudaStreamDestroy(stream_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cuda::Stream stream() const { return stream_; }

  // A device copy of what the tensor holds, poison included. "Not given" stays so.
  Tensor put(const ConstTensor& host) {
    Tensor t{const_cast<void*>(host.data), host.dtype, host.rank, {}};
    std::memcpy(t.dims, host.dims, sizeof t.dims);
    if (host.given()) t.data = put_bytes(const_cast<void*>(host.data), host.bytes());
    return t;
  }
  PlanOutputs put(const PlanOutputs& plan) {
    return {put(plan.counts), put(plan.offsets), put(plan.slot_of_row), put(plan.row_of_slot)};
  }

  // Poisoned scratch of exactly `bytes` bytes.
  Tensor workspace(int64_t bytes) {
    Tensor t{nullptr, DType::kU8, 1, {bytes}};
    t.data = put_bytes(nullptr, bytes);
    return t;
  }

  // Waits for the work, copies everything back to the host tensors, and checks the guards.
  void finish() {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess)
        << cudaGetErrorString(cudaGetLastError());
    for (const Copy& c : copies_) {
      std::vector<uint8_t> bytes(static_cast<size_t>(c.bytes + 2 * kGuard));
      ASSERT_EQ(cudaMemcpy(bytes.data(), c.data - kGuard, bytes.size(), cudaMemcpyDeviceToHost),
                cudaSuccess);
      for (int64_t i = 0; i < kGuard; ++i) {
        ASSERT_EQ(bytes[i], 0xFF) << "write before a device array of " << c.bytes << " bytes";
        ASSERT_EQ(bytes[kGuard + c.bytes + i], 0xFF)
            << "write after a device array of " << c.bytes << " bytes";
      }
      if (c.host != nullptr && c.bytes > 0) std::memcpy(c.host, bytes.data() + kGuard, c.bytes);
    }
  }

 private:
  static constexpr int64_t kGuard = 256;

  struct Copy {
    void* allocation;
    uint8_t* data;
    void* host;
    int64_t bytes;
  };

  // Without `host` the copy is scratch.
  void* put_bytes(void* host, int64_t bytes) {
    static const bool raw_workspace = std::getenv("DROPLESS_TEST_RAW_WORKSPACE") != nullptr;
    Copy c{nullptr, nullptr, host, bytes};
    const size_t size = static_cast<size_t>(bytes + 2 * kGuard + misalignment_);
    EXPECT_EQ(cudaMalloc(&c.allocation, size), cudaSuccess);
    c.data = static_cast<uint8_t*>(c.allocation) + kGuard + misalignment_;
    if (host == nullptr && bytes > 0 && raw_workspace) {
      allocations_.push_back(c.allocation);
      return c.data;
    }
    EXPECT_EQ(cudaMemset(c.allocation, 0xFF, size), cudaSuccess);
    if (host != nullptr && bytes > 0) {
      EXPECT_EQ(cudaMemcpy(c.data, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    allocations_.push_back(c.allocation);
    copies_.push_back(c);
    return c.data;
  }

  int64_t misalignment_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> allocations_;
  std::vector<Copy> copies_;
};

// Tests that need a GPU; without one they are skipped.
template <class Base = ::testing::Test>
class GpuTest : public Base {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

// Captures what `enqueue(stream)` does into a graph and replays it `times` times.
template <class Enqueue>
void replay(const Device& device, int times, const Enqueue& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(device.stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  enqueue(device.stream());
  ASSERT_EQ(cudaStreamEndCapture(device.stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < times; ++i) {
    ASSERT_EQ(cudaGraphLaunch(executable, device.stream()), cudaSuccess);
  }
  ASSERT_EQ(cudaStreamSynchronize(device.stream()), cudaSuccess);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

}  // namespace dropless::testing
