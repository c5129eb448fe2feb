// Elements of float32 and bfloat16 arrays, one at a time or 16 bytes at a time, as fp32.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace dropless::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements as one memory access; pointers are multiples of its size.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T element[N];

  __device__ static Pack load(const T* from) { return *reinterpret_cast<const Pack*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<Pack*>(to) = *this; }
};

}  // namespace dropless::cuda
