// FP8 quantisation in blocks: 1x128 along rows, and 128x128 of weights in both orientations.
#pragma once

#include <cstdint>

#include "cuda/tile/element.cuh"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/warp.cuh"
#include "dropless/types.h"

namespace dropless::cuda {

constexpr int kBlock = static_cast<int>(kScaleBlock);
constexpr int kPackSize = 8;  // elements: 16 bytes of bfloat16, 8 bytes of codes

// Eight codes: two words, the first element in the lowest byte.
template <class T>
__device__ uint2 encode_pack(const Pack<T, kPackSize>& v, float inverse) {
  return make_uint2(fp8::encode_e4m3x4(v[0], v[1], v[2], v[3], inverse),
                    fp8::encode_e4m3x4(v[4], v[5], v[6], v[7], inverse));
}

template <class T>
struct QuantizeRowsParams {
  const T* x;    // [R, C]
  uint8_t* q;    // [R, C]
  float* scale;  // [R, ceil(C/128)]
  int64_t rows;
  int64_t width;  // C
  int64_t blocks_per_row;
  ScaleRounding rounding;
};

// 1x128 blocks that a group of lanes has in flight. Four measured 40 % slower (bfloat16):
// registers.
constexpr int kRowsUnroll = 2;
constexpr int kRowsThreads = 256;
constexpr int kLanesPerBlock = kBlock / (2 * kPackSize);  // 8: two packs of 8 a lane

// For C a multiple of 8 and packs aligned. Eight lanes quantise a block; pack h of lane l starts at
// column 64 h + 8 l, so that eight lanes read 128 contiguous bytes (bfloat16).
template <class T>
__global__ void __launch_bounds__(kRowsThreads, 4) quantize_rows_kernel(QuantizeRowsParams<T> p) {
  const int sub = lane_id() % kLanesPerBlock;
  const int64_t group =
      (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanesPerBlock;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * blockDim.x / kLanesPerBlock;
  const int64_t blocks = p.rows * p.blocks_per_row;
  Pack<T, kPackSize> held[kRowsUnroll][2];
  int64_t start[kRowsUnroll];
  int left[kRowsUnroll];  // columns of the block from this lane's first pack on
#pragma unroll
  for (int u = 0; u < kRowsUnroll; ++u) {
    const int64_t block = group + u * groups;
    const int64_t row = block / p.blocks_per_row;
    const int64_t column = (block - row * p.blocks_per_row) * kBlock + sub * kPackSize;
    start[u] = row * p.width + column;
    left[u] = block < blocks ? static_cast<int>(min(p.width - column, int64_t{kBlock})) : 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      held[u][h] = {};
      if (left[u] > h * kBlock / 2) {
        held[u][h] = Pack<T, kPackSize>::load(p.x + start[u] + h * kBlock / 2);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kRowsUnroll; ++u) {
    const int64_t block = group + u * groups;
    float amax = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < kPackSize; ++c) {
        amax = fmaxf(amax, fp8::finite_magnitude(held[u][h][c]));
      }
    }
    const float scale = fp8::block_scale(warp_max<kLanesPerBlock>(amax), p.rounding);
    const float inverse = fp8::inverse_scale(scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (left[u] <= h * kBlock / 2) continue;
      *reinterpret_cast<uint2*>(p.q + start[u] + h * kBlock / 2) = encode_pack(held[u][h], inverse);
    }
    if (sub == 0 && block < blocks) p.scale[block] = scale;
  }
}

// For any C: one warp a block, single elements.
template <class T>
__global__ void quantize_rows_any_kernel(QuantizeRowsParams<T> p) {
  constexpr int kPerLane = kBlock / kWarpSize;
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
  if (block >= p.rows * p.blocks_per_row) return;
  const int64_t row = block / p.blocks_per_row;
  const int64_t first = (block - row * p.blocks_per_row) * kBlock + lane_id();
  float value[kPerLane];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t column = first + i * kWarpSize;
    value[i] = column < p.width ? to_float(p.x[row * p.width + column]) : 0.0f;
    amax = fmaxf(amax, fp8::finite_magnitude(value[i]));
  }
  const float scale = fp8::block_scale(warp_max(amax), p.rounding);
  const float inverse = fp8::inverse_scale(scale);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t column = first + i * kWarpSize;
    if (column < p.width) p.q[row * p.width + column] = fp8::encode_e4m3(value[i], inverse);
  }
  if (lane_id() == 0) p.scale[block] = scale;
}

template <class T>
struct QuantizeWeightParams {
  const T* w;      // [E, rows, cols]
  uint8_t* q;      // [E, rows, cols]
  uint8_t* q_t;    // [E, cols, rows]
  float* scale;    // [E, ceil(rows/128), ceil(cols/128)]
  float* scale_t;  // [E, ceil(cols/128), ceil(rows/128)]
  int64_t rows;    // "in"
  int64_t cols;    // "out"
  ScaleRounding rounding;
};

constexpr int kWeightThreads = 256;
constexpr int kQuad = 4;                            // rows whose codes make one word of a column
constexpr int kQuads = kBlock / kQuad;              // 32
constexpr int kPacks = kBlock / kPackSize;          // 16 packs across a tile's row
constexpr int kQuadStep = kWeightThreads / kPacks;  // 16: a thread has quads q and q + 16
constexpr int kQuadsPerThread = kQuads / kQuadStep;

// Where the word of column c, quad q lies in the transposed tile [128, 32]. The exclusive or
// spreads the 16 packs of a store, and the quads of a load, over all 32 banks.
__device__ inline int transposed_word(int column, int quad) {
  return column * kQuads + (quad ^ (column / kPackSize * 2));
}

// rows[i] holds columns 0..3 of row i; afterwards rows[i] holds rows 0..3 of column i.
__device__ inline void transpose_bytes(uint32_t (&rows)[kQuad]) {
  const uint32_t a = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t b = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t c = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t d = __byte_perm(rows[2], rows[3], 0x7362);
  rows[0] = __byte_perm(a, b, 0x5410);
  rows[1] = __byte_perm(a, b, 0x7632);
  rows[2] = __byte_perm(c, d, 0x5410);
  rows[3] = __byte_perm(c, d, 0x7632);
}

// kVector: rows are a multiple of 4, columns of 8, and packs are aligned; otherwise single
// elements.
template <class T, bool kVector>
__device__ Pack<T, kPackSize> load_weight_pack(const QuantizeWeightParams<T>& p, const T* w,
                                               int64_t row, int64_t column) {
  if constexpr (kVector) {
    if (row < p.rows && column < p.cols) return Pack<T, kPackSize>::load(w + row * p.cols + column);
    return {};
  } else {
    float value[kPackSize];
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) {
      const bool inside = row < p.rows && column + c < p.cols;
      value[c] = inside ? to_float(w[row * p.cols + column + c]) : 0.0f;
    }
    return Pack<T, kPackSize>::from(value);
  }
}

template <bool kVector>
__device__ void store_codes(uint8_t* to, int64_t inside, uint2 codes) {
  if constexpr (kVector) {
    if (inside > 0) *reinterpret_cast<uint2*>(to) = codes;
  } else {
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) {
      const uint32_t word = c < 4 ? codes.x : codes.y;
      if (c < inside) to[c] = static_cast<uint8_t>(word >> (c % 4 * 8));
    }
  }
}

template <bool kVector>
__device__ void store_column_word(uint8_t* to, int64_t inside, uint32_t word) {
  if constexpr (kVector) {
    if (inside > 0) *reinterpret_cast<uint32_t*>(to) = word;
  } else {
#pragma unroll
    for (int r = 0; r < kQuad; ++r) {
      if (r < inside) to[r] = static_cast<uint8_t>(word >> (r * 8));
    }
  }
}

// Grid: (ceil(cols/128), ceil(rows/128), E).
template <class T, bool kVector>
__global__ void __launch_bounds__(kWeightThreads, 3)
    quantize_weight_kernel(QuantizeWeightParams<T> p) {
  constexpr int kWarps = kWeightThreads / kWarpSize;
  __shared__ uint32_t transposed[kBlock * kQuads];
  __shared__ float warp_amax[kWarps];
  const int warp = threadIdx.x / kWarpSize;
  const int pack = threadIdx.x % kPacks;
  const int first_quad = threadIdx.x / kPacks;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kBlock;
  const int64_t tile_column = static_cast<int64_t>(blockIdx.x) * kBlock;
  const int64_t matrix = static_cast<int64_t>(blockIdx.z) * p.rows * p.cols;
  const int64_t column = tile_column + pack * kPackSize;

  Pack<T, kPackSize> value[kQuadsPerThread][kQuad];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuadsPerThread; ++i) {
#pragma unroll
    for (int r = 0; r < kQuad; ++r) {
      const int64_t row = tile_row + (first_quad + i * kQuadStep) * kQuad + r;
      value[i][r] = load_weight_pack<T, kVector>(p, p.w + matrix, row, column);
    }
  }
#pragma unroll
  for (int i = 0; i < kQuadsPerThread; ++i) {
#pragma unroll
    for (int r = 0; r < kQuad; ++r) {
#pragma unroll
      for (int c = 0; c < kPackSize; ++c) amax = fmaxf(amax, fp8::finite_magnitude(value[i][r][c]));
    }
  }
  // The compiler would keep all 64 elements as floats in registers from here to their encoding; as
  // far as it knows now, the packed words may have changed.
#pragma unroll
  for (int i = 0; i < kQuadsPerThread; ++i) {
#pragma unroll
    for (int r = 0; r < kQuad; ++r) {
      for (uint32_t& word : value[i][r].word) asm volatile("" : "+r"(word));
    }
  }
  amax = warp_max(amax);
  if (lane_id() == 0) warp_amax[warp] = amax;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, warp_amax[w]);
  const float scale = fp8::block_scale(amax, p.rounding);
  const float inverse = fp8::inverse_scale(scale);
  if (threadIdx.x == 0) {
    const int64_t e = blockIdx.z;
    p.scale[(e * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = scale;
    p.scale_t[(e * gridDim.x + blockIdx.x) * gridDim.y + blockIdx.y] = scale;
  }

#pragma unroll
  for (int i = 0; i < kQuadsPerThread; ++i) {
    const int quad = first_quad + i * kQuadStep;
    uint32_t low[kQuad];   // columns 0..3 of the pack
    uint32_t high[kQuad];  // columns 4..7
#pragma unroll
    for (int r = 0; r < kQuad; ++r) {
      const int64_t row = tile_row + quad * kQuad + r;
      const uint2 codes = encode_pack(value[i][r], inverse);
      if (row < p.rows) {
        store_codes<kVector>(p.q + matrix + row * p.cols + column, p.cols - column, codes);
      }
      low[r] = codes.x;
      high[r] = codes.y;
    }
    transpose_bytes(low);
    transpose_bytes(high);
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      transposed[transposed_word(pack * kPackSize + c, quad)] = low[c];
      transposed[transposed_word(pack * kPackSize + kQuad + c, quad)] = high[c];
    }
  }
  __syncthreads();
  const int64_t first_row = tile_row + lane_id() * kQuad;
  for (int c = warp; c < kBlock && tile_column + c < p.cols; c += kWarps) {
    store_column_word<kVector>(p.q_t + matrix + (tile_column + c) * p.rows + first_row,
                               p.rows - first_row, transposed[transposed_word(c, lane_id())]);
  }
}

}  // namespace dropless::cuda
