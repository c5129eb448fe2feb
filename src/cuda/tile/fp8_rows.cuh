// Quantising rows that lie in wgmma's fragments: 64 rows x 128 columns, of which a thread holds 32
// columns of rows r (registers 4j + 0, 1) and r + 8 (4j + 2, 3). The four lanes of a quad hold a
// row.
#pragma once

#include "cuda/ptx/matrix_move.cuh"
#include "cuda/tile/fp8.cuh"

namespace dropless::cuda::fp8 {

inline constexpr int kRowRegisters = 64;

struct RowScales {
  float scale[2];
  float inverse[2];
};

// Codes of two values, the first in the lower byte. Adding 0 * x makes NaN of an infinity, which
// the conversion would saturate, and leaves the rest as it is.
__device__ __forceinline__ uint16_t encode_pair(float a, float b, float inverse) {
  const float x = __fmul_rn(a, inverse), y = __fmul_rn(b, inverse);
  return __nv_cvt_float2_to_fp8x2(make_float2(__fmaf_rn(x, 0.0f, x), __fmaf_rn(y, 0.0f, y)),
                                  __NV_SATFINITE, __NV_E4M3);
}

// Codes of four values, the first in the lowest byte.
__device__ __forceinline__ uint32_t encode_four(const float* v, float inverse) {
  return encode_pair(v[0], v[1], inverse) | uint32_t{encode_pair(v[2], v[3], inverse)} << 16;
}

struct BlockScale {
  float scale;
  float inverse;
};

// The scale of a row of which kLanes neighbouring lanes have kValues values each.
template <int kLanes, int kValues>
__device__ __forceinline__ BlockScale row_scale(const float (&value)[kValues],
                                                ScaleRounding rounding) {
  float amax = 0.0f;
#pragma unroll
  for (float v : value) amax = fmaxf(amax, fabsf(v));
  if (amax == INFINITY) {  // infinity takes no part; rare
    amax = 0.0f;
#pragma unroll
    for (float v : value) amax = fmaxf(amax, finite_magnitude(v));
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  }
  const float scale = block_scale(amax, rounding);
  return {scale, inverse_scale(scale)};
}

// The scales of this thread's two rows.
__device__ __forceinline__ RowScales row_scales(const float* value, ScaleRounding rounding) {
  RowScales rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowRegisters / 2; ++i) {
      amax = fmaxf(amax, fabsf(value[i / 2 * 4 + half * 2 + i % 2]));
    }
    if (amax == INFINITY) {  // infinity takes no part; rare
      amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kRowRegisters / 2; ++i) {
        amax = fmaxf(amax, finite_magnitude(value[i / 2 * 4 + half * 2 + i % 2]));
      }
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    rows.scale[half] = block_scale(amax, rounding);
    rows.inverse[half] = inverse_scale(rows.scale[half]);
  }
  return rows;
}

// Writes the codes of a warpgroup's 64 rows as rows of 128 bytes, swizzled by 128.
__device__ __forceinline__ void write_codes(uint32_t smem_address, const float* value,
                                            const RowScales& rows, int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * half;
    const uint32_t base = smem_address + row * 128 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kRowRegisters / 4; ++j) {
      ptx::store_shared_2(
          base + (((j / 2) ^ (row & 7)) << 4) + j % 2 * 8,
          encode_pair(value[4 * j + 2 * half], value[4 * j + 2 * half + 1], rows.inverse[half]));
    }
  }
}

// Stores the scales of this thread's two rows, `stride` floats apart, of which `rows` of the 64
// exist.
__device__ __forceinline__ void store_scales(float* scale, int64_t stride, const RowScales& values,
                                             int rows, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
  if (thread % 4 != 0) return;
  if (row < rows) scale[row * stride] = values.scale[0];
  if (row + 8 < rows) scale[(row + 8) * stride] = values.scale[1];
}

// Scales of a row of zeros; one warp.
__device__ __forceinline__ void store_unit_scales(float* scale, int64_t count, int lane) {
  for (int64_t i = lane; i < count; i += 32) scale[i] = 1.0f;
}

}  // namespace dropless::cuda::fp8
