// Reductions over the 32 lanes of a warp, in an order that never changes.
#pragma once

#include <cstdint>

namespace dropless::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// Sum over the lanes at distances `Lanes`/2, ..., 2, 1: every lane of a group of `Lanes` gets the
// same bits, those of the pairwise sum.
template <int Lanes = kWarpSize, class T>
__device__ T warp_sum(T value) {
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

// Largest value over groups of `Lanes` lanes. NaN is ignored, as fmaxf does.
template <int Lanes = kWarpSize>
__device__ float warp_max(float value) {
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// The same over groups of `lanes` lanes, a power of two that is known only when the kernel runs.
__device__ inline float group_sum(float value, int lanes) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    if (distance < lanes) value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

__device__ inline float group_max(float value, int lanes) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    if (distance < lanes) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Whether any lane of this lane's group says so.
__device__ inline bool group_any(bool value, int lanes) {
  const unsigned group = (kFullWarp >> (kWarpSize - lanes)) << (lane_id() & ~(lanes - 1));
  return (__ballot_sync(kFullWarp, value) & group) != 0;
}

// Sum over the lanes below this one.
__device__ inline int warp_exclusive_scan(int value) {
  const int lane = lane_id();
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int below = __shfl_up_sync(kFullWarp, sum, distance);
    if (lane >= distance) sum += below;
  }
  return sum - value;
}

}  // namespace dropless::cuda
