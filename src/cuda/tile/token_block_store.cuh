// Quantising a tile's columns where its rows are a block of 128 rows of one expert: the operands of
// FP8 weight gradients (core/token_blocks.h), made from the fragments of the product before them.
//
// Two warpgroups hold 64 rows each. A column's largest magnitude goes over the lanes of a warp,
// then through shared memory over all eight warps; codes of rows r and r + 8, which one thread
// holds, are neighbours in the block's order, so that a transposing matrix store puts 16 of a
// column's codes in a row.
#pragma once

#include "core/token_blocks.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/fp8_rows.cuh"
#include "cuda/tile/result.cuh"

namespace dropless::cuda {

// A BlockedOperand in device memory.
struct BlockedResult {
  uint8_t* q = nullptr;    // [blocks, planes, columns, 128]
  float* scale = nullptr;  // [blocks, planes, columns]
  int planes = 1;
  int columns = 0;

  // Of a tile's first column.
  __device__ __forceinline__ int64_t at(int64_t block, int plane, int col) const {
    return (block * planes + plane) * columns + col;
  }
};

// Three matrices of one tile of 128 rows x 128 columns: gate and up of dh, and pA.
class TokenBlockStore {
 public:
  static constexpr int kMatrices = 3;
  static constexpr int kPairs = 32;  // registers of a matrix: two columns each, in bf16
  using Fragment = uint32_t[kPairs];

  // `boxes`: of the first warpgroup, then as many of the second; the first four of each are free
  // once both have added.
  __device__ TokenBlockStore(uint8_t* boxes, int boxes_of_warpgroup, int warpgroup)
      : first_(boxes),
        second_(boxes + boxes_of_warpgroup * kChunkBytes),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % kWarpgroup) {}

  // Each warp, of each matrix: value[2j + half] holds columns 8j + 2(lane % 4) + {0, 1} of row
  // lane / 4 + 8 half; zeros where no row is. Its rows of the third box are free.
  __device__ __forceinline__ void add(int matrix, const Fragment& value) const {
    uint32_t most[kPairs / 2];
    uint32_t all = 0;
#pragma unroll
    for (int j = 0; j < kPairs / 2; ++j) {
      most[j] = __vmaxu2(value[2 * j] & 0x7FFF7FFFu, value[2 * j + 1] & 0x7FFF7FFFu);
      all = __vmaxu2(all, most[j]);
    }
    if ((all & 0xFFFFu) >= kInfinity || all >> 16 >= kInfinity) {  // takes no part; rare
#pragma unroll
      for (int j = 0; j < kPairs / 2; ++j) {
        most[j] = __vmaxu2(finite(value[2 * j]), finite(value[2 * j + 1]));
      }
    }
    // Over lanes that hold the same columns; each keeps half of what it has.
    const int lane = thread_ % 32;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const int count = kPairs / 4 >> step, mask = 16 >> step;
#pragma unroll
      for (int i = 0; i < kPairs / 4; ++i) {
        if (i >= count) break;
        const uint32_t low = most[i], high = most[count + i];
        const uint32_t other = __shfl_xor_sync(~0u, lane & mask ? low : high, mask);
        most[i] = __vmaxu2(lane & mask ? high : low, other);
      }
    }
    const int j = (lane & 16 ? 8 : 0) + (lane & 8 ? 4 : 0) + (lane & 4 ? 2 : 0);
    const uint32_t to = amax_of(warpgroup_ * 4 + thread_ / 32) + matrix * kAmaxBytes + lane % 4 * 4;
    ptx::store_shared_word(to + j * 16, most[0]);
    ptx::store_shared_word(to + (j + 1) * 16, most[1]);
  }
  // The same for a warpgroup without rows.
  __device__ __forceinline__ void add_nothing() const {
    const uint32_t to = amax_of(warpgroup_ * 4 + thread_ / 32);
#pragma unroll
    for (int i = 0; i < kMatrices * kAmaxBytes / 128; ++i) {
      ptx::store_shared_word(to + i * 128 + thread_ % 32 * 4, 0);
    }
  }

  // Both warpgroups: scales, from what all warps have added.
  __device__ __forceinline__ void scale(const BlockedResult& dh, const BlockedResult& pa,
                                        int64_t block, int col, ScaleRounding rounding) const {
    sync();
    const int pair = warpgroup_ * kWarpgroup + thread_;  // of columns
    if (pair < kMatrices * kFp8Block / 2) {
      uint32_t most = 0;
#pragma unroll
      for (int warp = 0; warp < 8; ++warp) {
        most = __vmaxu2(most, ptx::load_shared_word(amax_of(warp) + pair * 4));
      }
      const int matrix = pair / (kFp8Block / 2), column = pair % (kFp8Block / 2) * 2;
      const float low = fp8::block_scale(ptx::low_bf16(most), rounding);
      const float high = fp8::block_scale(ptx::high_bf16(most), rounding);
      float* const to =
          matrix < 2 ? dh.scale + dh.at(block, matrix, col) : pa.scale + pa.at(block, 0, col);
      *reinterpret_cast<float2*>(to + column) = make_float2(low, high);
      ptx::store_shared_v2(inverse() + pair * 8, fp8::inverse_scale(low), fp8::inverse_scale(high));
    }
    sync();
  }

  // The codes of what was added.
  __device__ __forceinline__ void write(int matrix, const Fragment& value) const {
    const int lane = thread_ % 32;
    const int unit = warpgroup_ * 4 + thread_ / 32;  // 16 rows
    const uint32_t to =
        ptx::shared_address(tile(matrix)) + lane * kFp8Block + ((unit ^ (lane % 8)) << 4);
    const uint32_t inverses = inverse() + matrix * kFp8Block * 4 + lane % 4 * 8;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {  // of 32 columns
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = quarter * 4 + i;
        const uint2 by = ptx::load_shared_pair(inverses + j * 32);
        const uint32_t a = value[2 * j], b = value[2 * j + 1];
        codes[i] =
            fp8::encode_pair(ptx::low_bf16(a), ptx::low_bf16(b), __uint_as_float(by.x)) |
            uint32_t{fp8::encode_pair(ptx::high_bf16(a), ptx::high_bf16(b), __uint_as_float(by.y))}
                << 16;
      }
      ptx::stmatrix_x4_transposed(to + quarter * 32 * kFp8Block, codes);
    }
  }
  __device__ __forceinline__ void write_nothing() const {
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      const uint32_t column = ptx::shared_address(tile(matrix)) + thread_ * kFp8Block;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::store_shared_zero16(column + (((warpgroup_ * 4 + i) ^ (thread_ % 8)) << 4));
      }
    }
  }

  // After both have written: one thread of each sends what lies in its boxes.
  __device__ __forceinline__ void send(const BlockedResult& dh, const BlockedResult& pa,
                                       int64_t block, int col) const {
    ptx::fence_proxy_async();
    sync();
    if (thread_ != 0) return;
    constexpr int kBytes = kFp8Block * kFp8Block;
    if (warpgroup_ == 0) {
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        ptx::bulk_store(dh.q + dh.at(block, plane, col) * kFp8Block, tile(plane), kBytes);
      }
    } else {
      ptx::bulk_store(pa.q + pa.at(block, 0, col) * kFp8Block, tile(2), kBytes);
    }
    ptx::tma_store_commit();
  }

 private:
  static constexpr uint32_t kInfinity = 0x7F80;
  static constexpr int kAmaxBytes = kFp8Block * 2;  // of a matrix

  __device__ static __forceinline__ uint32_t finite(uint32_t pair) {
    const uint32_t low = pair & 0x7FFFu, high = pair >> 16 & 0x7FFFu;
    return (low < kInfinity ? low : 0) | (high < kInfinity ? high : 0) << 16;
  }
  __device__ static __forceinline__ void sync() {
    ptx::named_barrier_sync(kWarpgroupBarrier + 2, 2 * kWarpgroup);
  }
  // Gate and up in the first warpgroup's boxes, pA in the second's.
  __device__ __forceinline__ uint8_t* tile(int matrix) const {
    return matrix < 2 ? first_ + matrix * 2 * kChunkBytes : second_;
  }
  __device__ __forceinline__ uint32_t inverse() const {
    return ptx::shared_address(second_ + 3 * kChunkBytes);
  }
  // In the rows of the third box that only this warp has read.
  __device__ __forceinline__ uint32_t amax_of(int warp) const {
    uint8_t* const third = (warp < 4 ? first_ : second_) + 2 * kChunkBytes;
    return ptx::shared_address(third + warp % 4 * (16 * 128));
  }

  uint8_t* const first_;
  uint8_t* const second_;
  const int warpgroup_;
  const int thread_;
};

}  // namespace dropless::cuda
