// The FP8 quantiser's scalar rules on the device, bit for bit those of core/quantize.cc.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "dropless/types.h"

namespace dropless::cuda::fp8 {

// |value| if it is finite, else 0: NaN and infinity take no part in a block's amax.
__device__ inline float finite_magnitude(float value) {
  const float magnitude = fabsf(value);
  return magnitude < INFINITY ? magnitude : 0.0f;
}

__device__ inline float block_scale(float amax, ScaleRounding rounding) {
  if (amax == 0.0f) return 1.0f;
  // The divisor is e4m3's largest value; the floor, the smallest normal float, keeps 1/scale
  // finite.
  const float scale = fmaxf(__fdiv_rn(amax, 448.0f), 0x1p-126f);
  if (rounding == ScaleRounding::kFp32) return scale;
  return __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0x7F800000u);
}

__device__ inline float inverse_scale(float scale) { return __frcp_rn(scale); }

// Code of value * inverse: nearest even, saturating; a value that is not finite gives 0x7F.
__device__ inline uint8_t encode_e4m3(float value, float inverse) {
  const bool finite = fabsf(value) < INFINITY;
  const float scaled = __fmul_rn(value, inverse);
#if __CUDA_ARCH__ >= 890
  const uint8_t code = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
#else
  // As encode_e4m3 of core/quantize.cc: cvt to e4m3 needs sm_89.
  const uint32_t bits = __float_as_uint(scaled);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint8_t code = (bits >> 24) & 0x80;
  if (magnitude >= __float_as_uint(448.0f)) {
    code |= 0x7E;
  } else if (magnitude < __float_as_uint(0x1p-6f)) {
    // Subnormal codes count steps of 2^-9, which is the ulp after adding 2^14.
    code |= __float_as_uint(__uint_as_float(magnitude) + 0x1p14f) & 0xF;
  } else {
    code |= (magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u) >> 20) - ((127u - 7u) << 3);
  }
#endif
  return finite ? code : uint8_t{0x7F};
}

// Codes of four finite values, the first in the lowest byte; two codes an instruction.
__device__ inline uint32_t encode_finite_e4m3x4(float a, float b, float c, float d, float inverse) {
#if __CUDA_ARCH__ >= 890
  const uint32_t low = __nv_cvt_float2_to_fp8x2(
      make_float2(__fmul_rn(a, inverse), __fmul_rn(b, inverse)), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(
      make_float2(__fmul_rn(c, inverse), __fmul_rn(d, inverse)), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
#else
  return uint32_t{encode_e4m3(a, inverse)} | uint32_t{encode_e4m3(b, inverse)} << 8 |
         uint32_t{encode_e4m3(c, inverse)} << 16 | uint32_t{encode_e4m3(d, inverse)} << 24;
#endif
}

// Codes of four values; the rare word with one that is not finite is made one by one.
__device__ inline uint32_t encode_e4m3x4(float a, float b, float c, float d, float inverse) {
  const bool finite =
      fabsf(a) < INFINITY && fabsf(b) < INFINITY && fabsf(c) < INFINITY && fabsf(d) < INFINITY;
  if (finite) return encode_finite_e4m3x4(a, b, c, d, inverse);
  return uint32_t{encode_e4m3(a, inverse)} | uint32_t{encode_e4m3(b, inverse)} << 8 |
         uint32_t{encode_e4m3(c, inverse)} << 16 | uint32_t{encode_e4m3(d, inverse)} << 24;
}

}  // namespace dropless::cuda::fp8
