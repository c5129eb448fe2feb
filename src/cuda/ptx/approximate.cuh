// The special function unit's approximations, one instruction a wrapper. Results below the smallest
// normal number are 0. Errors as the PTX manual states them.
#pragma once

namespace dropless::cuda::ptx {

// 2^x, relative error 2^-22.
__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// log2(x), error 2^-22: absolute from 1/2 to 2, relative elsewhere.
__device__ __forceinline__ float log2_approximate(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x, to one unit in the last place.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace dropless::cuda::ptx
