// Eight adjacent elements of a row in device memory, as fp32: 16 bytes at a time where addresses
// allow it, else one by one.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/tile/element.cuh"

namespace dropless::cuda {

// [planes, rows, cols] of an operand or a result.
struct RowArray {
  uint8_t* data;
  int64_t row_bytes;
  int64_t plane_bytes;
};

// Elements from `count` on do not exist: they are 0, and not stored. `vector`: the address is a
// multiple of 16 bytes, and so is what exists. kConstant: nothing writes the array while the kernel
// runs, so that loads may be moved before stores to other arrays.
template <class T, bool kConstant = true>
__device__ __forceinline__ void load_8(const uint8_t* from, int count, bool vector,
                                       float (&value)[8]) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = 0.0f;
  if (vector) {
#pragma unroll
    for (int first = 0; first < 8; first += kPack) {
      if (first >= count) continue;
      const auto* vector_of = reinterpret_cast<const uint4*>(from + first * sizeof(T));
      const uint4 v = kConstant ? __ldg(vector_of) : *vector_of;
      const Pack<T, kPack> pack = {{v.x, v.y, v.z, v.w}};
#pragma unroll
      for (int i = 0; i < kPack; ++i) value[first + i] = pack[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T* element = reinterpret_cast<const T*>(from) + i;
      if (i < count) value[i] = to_float(kConstant ? __ldg(element) : *element);
    }
  }
}

template <class T>
__device__ __forceinline__ void store_8(uint8_t* to, int count, bool vector,
                                        const float (&value)[8]) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  if (vector) {
#pragma unroll
    for (int first = 0; first < 8; first += kPack) {
      if (first >= count) continue;
      float part[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) part[i] = value[first + i];
      Pack<T, kPack>::from(part).store(reinterpret_cast<T*>(to) + first);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) reinterpret_cast<T*>(to)[i] = static_cast<T>(value[i]);
    }
  }
}

// Zeroes a row of `cols` elements; one warp.
template <class T>
__device__ __forceinline__ void zero_elements(uint8_t* row, int cols, bool vector, int lane) {
  const float zero[8] = {};
  for (int64_t col = lane * 8; col < cols; col += 256) {
    store_8<T>(row + col * sizeof(T), cols - static_cast<int>(col), vector, zero);
  }
}

}  // namespace dropless::cuda
