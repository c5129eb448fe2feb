// Elements of float32 and bfloat16 arrays, several at a time, as fp32.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace dropless::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// N elements as one memory access (two if they are 32 bytes); pointers are multiples of its
// alignment. The elements stay packed in 32-bit words until they are read: as an array of 16-bit
// elements, the compiler would give each one a register.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  uint32_t word[sizeof(T) * N / 4];

  __device__ static Pack load(const T* from) { return *reinterpret_cast<const Pack*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<Pack*>(to) = *this; }

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(word[i]);
    const uint32_t pair = word[i / 2];
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
  }
  __device__ static Pack from(const float (&value)[N]) {
    Pack pack;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) pack.word[i] = __float_as_uint(value[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
        pack.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    return pack;
  }
};

// A single bfloat16: half a word.
template <>
struct Pack<__nv_bfloat16, 1> {
  __nv_bfloat16 value;

  __device__ static Pack load(const __nv_bfloat16* from) { return {*from}; }
  __device__ void store(__nv_bfloat16* to) const { *to = value; }
  __device__ float operator[](int) const { return __bfloat162float(value); }
  __device__ static Pack from(const float (&v)[1]) { return {__float2bfloat16_rn(v[0])}; }
};

}  // namespace dropless::cuda
