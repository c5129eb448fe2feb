// Pieces of the stand-alone GPU programs: device arrays, random data, ragged groups, comparison,
// timing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dropless/status.h"
#include "dropless/types.h"

namespace harness {

using dropless::ConstTensor;
using dropless::DType;
using dropless::Tensor;

#define HARNESS_CUDA(call)                                                                \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

// A device array that is poisoned with 0xFF (NaN in every float type) when made.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::vector<int64_t> dims) {
    tensor_.dtype = dtype;
    tensor_.rank = static_cast<int>(dims.size());
    std::copy(dims.begin(), dims.end(), tensor_.dims);
    HARNESS_CUDA(cudaMalloc(&tensor_.data, std::max<int64_t>(tensor_.bytes(), 16)));
    poison();
  }
  Array(Array&& other) noexcept : tensor_(other.tensor_) { other.tensor_ = Tensor(); }
  Array& operator=(Array&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~Array() {
    if (tensor_.data != nullptr) cudaFree(tensor_.data);
  }
  void poison() { HARNESS_CUDA(cudaMemset(tensor_.data, 0xFF, tensor_.bytes())); }
  Tensor tensor() const { return tensor_; }
  operator ConstTensor() const { return tensor_; }
  operator Tensor() const { return tensor_; }
  int64_t size() const { return tensor_.size(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(tensor_.data);
  }
  template <class T>
  void upload(const std::vector<T>& host) {
    HARNESS_CUDA(cudaMemcpy(tensor_.data, host.data(), host.size() * sizeof(T), cudaMemcpyDefault));
  }
  std::vector<uint8_t> download_bytes() const {
    std::vector<uint8_t> host(tensor_.bytes());
    HARNESS_CUDA(cudaMemcpy(host.data(), tensor_.data, host.size(), cudaMemcpyDefault));
    return host;
  }
  template <class T>
  std::vector<T> download() const {
    std::vector<T> host(tensor_.size());
    HARNESS_CUDA(cudaMemcpy(host.data(), tensor_.data, host.size() * sizeof(T), cudaMemcpyDefault));
    return host;
  }

 private:
  Tensor tensor_;
};

__device__ inline uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

template <class T>
__global__ void fill_normal_kernel(T* out, int64_t n, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t bits = mix(seed * 0x100000001ull + i);
    const float u = (static_cast<uint32_t>(bits >> 40) + 1) * (1.0f / 16777217.0f);
    const float v = static_cast<uint32_t>(bits & 0xFFFFFF) * (1.0f / 16777216.0f);
    out[i] = static_cast<T>(scale * sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v));
  }
}

inline Array normal(DType dtype, std::vector<int64_t> dims, uint64_t seed, float scale = 1.0f) {
  Array array(dtype, dims);
  if (array.size() == 0) return array;
  if (dtype == DType::kBF16) {
    fill_normal_kernel<<<1024, 256>>>(array.as<__nv_bfloat16>(), array.size(), seed, scale);
  } else {
    fill_normal_kernel<<<1024, 256>>>(array.as<float>(), array.size(), seed, scale);
  }
  HARNESS_CUDA(cudaGetLastError());
  return array;
}

// Offsets [E+1] of random groups: sizes uniform in mean * (1 +- spread), summing to `total`.
inline std::vector<int32_t> random_offsets(int experts, int64_t total, double spread,
                                           uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(1 - spread, 1 + spread);
  std::vector<double> weight(experts);
  double sum = 0;
  for (double& w : weight) sum += w = uniform(random);
  std::vector<int32_t> offsets(experts + 1, 0);
  double running = 0;
  for (int e = 0; e < experts; ++e) {
    running += weight[e];
    offsets[e + 1] = static_cast<int32_t>(std::llround(running / sum * total));
  }
  return offsets;
}

inline std::vector<int32_t> offsets_of(const std::vector<int>& sizes, int first = 0) {
  std::vector<int32_t> offsets = {first};
  for (int size : sizes) offsets.push_back(offsets.back() + size);
  return offsets;
}

template <class T>
inline std::vector<float> to_float(const Array& array) {
  const std::vector<T> host = array.download<T>();
  return std::vector<float>(host.begin(), host.end());
}
inline std::vector<float> floats(const Array& array) {
  return array.tensor().dtype == DType::kBF16 ? to_float<__nv_bfloat16>(array)
                                              : to_float<float>(array);
}

// Root-mean-square error of `got` over the reference's RMS, and the largest error over it; infinite
// if `got` has anything that is not finite.
struct Error {
  double rms = 0, largest = 0;
  int64_t where = -1;
};
inline Error compare(const std::vector<float>& got, const std::vector<float>& want) {
  double square = 0, reference = 0, largest = 0;
  Error error;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return {INFINITY, INFINITY, static_cast<int64_t>(i)};
    const double d = std::fabs(static_cast<double>(got[i]) - want[i]);
    square += d * d;
    reference += static_cast<double>(want[i]) * want[i];
    if (d > largest) largest = d, error.where = static_cast<int64_t>(i);
  }
  const double norm = std::sqrt(reference / std::max<size_t>(want.size(), 1));
  if (norm == 0) return {square, largest, error.where};
  error.rms = std::sqrt(square / want.size()) / norm;
  error.largest = largest / norm;
  return error;
}

inline int failures = 0;

// bf16 keeps 8 bits: rounding to nearest moves a value by at most 2^-9 of it, 2^-9/sqrt(3) in the
// mean.
inline void expect_values(const std::string& name, const std::vector<float>& got,
                          const std::vector<float>& want, double rms_bound = 2.5e-3) {
  const Error error = compare(got, want);
  const bool ok = error.rms <= rms_bound;
  if (!ok) ++failures;
  std::printf("%s %-58s rms %.2e largest %.2e%s\n", ok ? "ok  " : "FAIL", name.c_str(), error.rms,
              error.largest, ok ? "" : (" at " + std::to_string(error.where)).c_str());
}
inline void expect_close(const std::string& name, const Array& got, const std::vector<float>& want,
                         double rms_bound = 2.5e-3) {
  expect_values(name, floats(got), want, rms_bound);
}

inline void require(const dropless::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "status: %s\n", status.message().c_str());
  std::exit(1);
}

// Names such as 128x256s4c2 of a tuple of cuda::GemmTile.
template <class Tiles>
std::vector<std::string> tile_names() {
  return []<size_t... kIndex>(std::index_sequence<kIndex...>) {
    auto name = [](auto tile) {
      return std::to_string(tile.kRows) + "x" + std::to_string(tile.kCols) + "s" +
             std::to_string(tile.kStages) + "c" + std::to_string(tile.kCluster) +
             (tile.kPingpong ? "pp" : "");
    };
    return std::vector<std::string>{name(std::tuple_element_t<kIndex, Tiles>())...};
  }
  (std::make_index_sequence<std::tuple_size_v<Tiles>>());
}

struct Timed {
  std::string name;
  double flops;
  std::function<void()> run;
  std::vector<float> ms;
  float median() const {
    std::vector<float> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
  float quantile(double q) const {
    std::vector<float> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<size_t>(q * (sorted.size() - 1))];
  }
};

// Times the candidates in turn, `rounds` times, so that drifting clocks touch all alike.
inline void time_interleaved(std::vector<Timed>& candidates, int rounds) {
  cudaEvent_t begin, end;
  HARNESS_CUDA(cudaEventCreate(&begin));
  HARNESS_CUDA(cudaEventCreate(&end));
  for (int round = -2; round < rounds; ++round) {
    for (Timed& candidate : candidates) {
      HARNESS_CUDA(cudaEventRecord(begin));
      candidate.run();
      HARNESS_CUDA(cudaEventRecord(end));
      HARNESS_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      HARNESS_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (round >= 0) candidate.ms.push_back(ms);
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace harness
