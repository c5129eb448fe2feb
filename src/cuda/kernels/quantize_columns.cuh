// FP8 quantisation in blocks of 128 rows x 1 column, transposed: what FP8 weight gradients
// multiply.
//
// The tensor cores read FP8 operands with the contraction contiguous, and here the contraction runs
// over an expert's rows. Rows may be gathered by token on the way.
#pragma once

#include <cstdint>

#include "core/token_blocks.h"
#include "cuda/kernels/quantize.cuh"

namespace dropless::cuda {

template <class T>
struct QuantizeColumnsParams {
  const T* x;                  // [M, planes, width], or [T, planes, width] if gathered
  const int32_t* slot_of_row;  // [M], or null: row r is row r of x
  const int32_t* offsets;      // [E+1]
  uint8_t* q;                  // [blocks, planes, columns, 128], see BlockedOperand
  float* scale;                // [blocks, planes, columns]
  int64_t width;
  int rows;  // M
  int experts;
  int planes;
  int plane_tiles;  // columns / 128
  int source_rows;  // T or M
  int experts_per_token;
  ScaleRounding rounding;
};

constexpr int kColumnsThreads = 256;
constexpr int kColumnsGroups = kColumnsThreads / kPacks;    // 16 groups of threads,
constexpr int kColumnsGroupRows = kBlock / kColumnsGroups;  // 8 rows each
constexpr int kUnitBytes = 16;                              // of a global or shared access
constexpr int kUnits = kBlock * kBlock / kUnitBytes;        // 1024 of a tile
constexpr int kRowUnits = kBlock / kUnitBytes;              // 8: the 128 rows of a column

// The rows of the expert that owns a block of 128.
struct TokenBlock {
  int first;  // row
  int rows;   // 0 if nobody owns the block
};

// Called by the whole thread block.
__device__ inline TokenBlock find_token_block(const int32_t* offsets, int experts, int rows,
                                              int block) {
  const auto offset_of = [&](int e) { return min(max(__ldg(offsets + e), 0), rows); };
  int before = 0;  // experts whose first block is not past this one: a prefix of all
  for (int base = 0; base < experts; base += static_cast<int>(blockDim.x)) {
    const int e = base + static_cast<int>(threadIdx.x);
    before += __syncthreads_count(e < experts && first_token_block(offset_of(e), e) <= block);
  }
  if (before == 0) return {0, 0};
  const int begin = offset_of(before - 1);
  const int skipped = (block - static_cast<int>(first_token_block(begin, before - 1))) * kBlock;
  return {begin + skipped, max(0, min(offset_of(before) - begin - skipped, kBlock))};
}

// Where 8 codes (positions 8 group .. + 7 of a column) lie in the shared tile, in units of 8 bytes.
// Of a column's eight 16-byte units, unit u lies at u ^ (column % 8) in device memory, which is the
// 128-byte swizzle that wgmma reads; in shared memory the pack is mixed in too, so that the 16
// packs of a store fall into different banks.
__device__ inline int code_slot(int column, int group) {
  const int pack = column / kPackSize;
  const int unit = (group / 2) ^ (column % 8) ^ (pack % 8);
  return (column * kRowUnits + unit) * 2 + ((group & 1) ^ (pack / 8));
}

// Largest finite magnitudes of a pack's columns over the rows a thread holds. True if it knows that
// every value is finite.
template <class T>
__device__ bool column_amax(const Pack<T, kPackSize> (&value)[kColumnsGroupRows],
                            float (&amax)[kPackSize]) {
  if constexpr (sizeof(T) == 2) {
    // Magnitudes order as their bits do, two columns an instruction.
    uint32_t most[kPackSize / 2] = {};
#pragma unroll
    for (int r = 0; r < kColumnsGroupRows; ++r) {
#pragma unroll
      for (int w = 0; w < kPackSize / 2; ++w) {
        most[w] = __vmaxu2(most[w], value[r].word[w] & 0x7FFF7FFFu);
      }
    }
    bool finite = true;
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) {
      amax[c] = __uint_as_float(c % 2 == 0 ? most[c / 2] << 16 : most[c / 2] & 0xFFFF0000u);
      finite = finite && amax[c] < INFINITY;
    }
    if (finite) return true;
  }
#pragma unroll
  for (int c = 0; c < kPackSize; ++c) {
    amax[c] = 0.0f;
#pragma unroll
    for (int r = 0; r < kColumnsGroupRows; ++r) {
      amax[c] = fmaxf(amax[c], fp8::finite_magnitude(value[r][c]));
    }
  }
  return false;
}

// Grid: one thread block for each tile of 128 rows x 128 columns, columns innermost.
// kVector: the width is a multiple of 8 and packs are aligned.
template <class T, bool kVector>
__global__ void __launch_bounds__(kColumnsThreads, sizeof(T) == 2 ? 4 : 2)
    quantize_columns_kernel(QuantizeColumnsParams<T> p) {
  constexpr int kWarps = kColumnsThreads / kWarpSize;
  __shared__ __align__(16) uint2 codes[kUnits * 2];
  __shared__ __align__(16) float warp_amax[kWarps][kBlock];
  __shared__ __align__(16) float inverse[kBlock];
  __shared__ int source[kBlock];  // row of x, or -1
  const int tiles = p.planes * p.plane_tiles;
  const int block = static_cast<int>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x) - block * tiles;
  const int plane = tile / p.plane_tiles;
  const int64_t first_column = int64_t{tile - plane * p.plane_tiles} * kBlock;
  const TokenBlock at = find_token_block(p.offsets, p.experts, p.rows, block);
  if (at.rows == 0) return;

  if (threadIdx.x < kBlock) {
    int row =
        static_cast<int>(threadIdx.x) < at.rows ? at.first + static_cast<int>(threadIdx.x) : -1;
    if (row >= 0 && p.slot_of_row != nullptr) {
      const int slot = p.slot_of_row[row];
      row = slot < 0 ? -1 : slot / p.experts_per_token;
    }
    source[threadIdx.x] = row < p.source_rows ? row : -1;
  }
  __syncthreads();

  const int pack = threadIdx.x % kPacks;
  const int group = threadIdx.x / kPacks;
  const int64_t column = first_column + pack * kPackSize;
  Pack<T, kPackSize> value[kColumnsGroupRows];
#pragma unroll
  for (int r = 0; r < kColumnsGroupRows; ++r) {
    const int row = source[token_block_row(group * kColumnsGroupRows + r)];
    value[r] = {};
    const T* from = p.x + (int64_t{row} * p.planes + plane) * p.width + column;
    if constexpr (kVector) {
      if (row >= 0 && column < p.width) value[r] = Pack<T, kPackSize>::load(from);
    } else {
      float element[kPackSize];
#pragma unroll
      for (int c = 0; c < kPackSize; ++c) {
        element[c] = row >= 0 && column + c < p.width ? to_float(from[c]) : 0.0f;
      }
      value[r] = Pack<T, kPackSize>::from(element);
    }
  }
  float amax[kPackSize];
  const bool finite = column_amax(value, amax);
#pragma unroll
  for (int c = 0; c < kPackSize; ++c) {  // a warp holds two groups of rows
    amax[c] = fmaxf(amax[c], __shfl_xor_sync(kFullWarp, amax[c], kPacks));
  }
  // As in quantize_weight_kernel: keeps the elements packed.
#pragma unroll
  for (int r = 0; r < kColumnsGroupRows; ++r) {
    for (uint32_t& word : value[r].word) asm volatile("" : "+r"(word));
  }
  if (lane_id() < kPacks) {
    float4* to = reinterpret_cast<float4*>(&warp_amax[threadIdx.x / kWarpSize][pack * kPackSize]);
    to[0] = make_float4(amax[0], amax[1], amax[2], amax[3]);
    to[1] = make_float4(amax[4], amax[5], amax[6], amax[7]);
  }
  __syncthreads();
  const int64_t tile_columns = (int64_t{block} * tiles + tile) * kBlock;
  if (threadIdx.x < kBlock) {
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warp_amax[w][threadIdx.x]);
    const float scale = fp8::block_scale(largest, p.rounding);
    p.scale[tile_columns + threadIdx.x] = scale;
    inverse[threadIdx.x] = fp8::inverse_scale(scale);
  }
  __syncthreads();
  const auto encode = [&](auto encode_x4) {
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) {
      const float by = inverse[pack * kPackSize + c];
      codes[code_slot(pack * kPackSize + c, group)] =
          make_uint2(encode_x4(value[0][c], value[1][c], value[2][c], value[3][c], by),
                     encode_x4(value[4][c], value[5][c], value[6][c], value[7][c], by));
    }
  };
  if (finite) {
    encode([](float a, float b, float c, float d, float by) {
      return fp8::encode_finite_e4m3x4(a, b, c, d, by);
    });
  } else {
    encode([](float a, float b, float c, float d, float by) {
      return fp8::encode_e4m3x4(a, b, c, d, by);
    });
  }
  __syncthreads();
  uint4* const out = reinterpret_cast<uint4*>(p.q + tile_columns * kBlock);
#pragma unroll
  for (int i = 0; i < kUnits / kColumnsThreads; ++i) {
    const int unit = static_cast<int>(threadIdx.x) + i * kColumnsThreads;
    const int packed = unit / kRowUnits / kPackSize;
    uint4 word = reinterpret_cast<const uint4*>(codes)[unit ^ (packed % 8)];
    if (packed >= 8) word = make_uint4(word.z, word.w, word.x, word.y);
    out[unit] = word;
  }
}

}  // namespace dropless::cuda
