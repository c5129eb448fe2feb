// A block's 128x128 tile of a product on GPUs since sm_80: multiplying a stage in shared memory
// into accumulators, and turning the accumulators into rows of fp32 in shared memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/stage_copy.cuh"

namespace dropless::cuda {

// The tile as fp32 rows in shared memory, for the epilogues. It takes the place of the stages.
class StagedTile {
 public:
  static constexpr int kBytes = kBlockRows * kBlockCols * 4;

  __device__ explicit StagedTile(uint32_t smem) : smem_(smem) {}

  // Address of 16-byte unit `unit` of a row. Swizzled so that neither fragments' writes nor reads
  // of two units a lane meet in a bank.
  __device__ __forceinline__ uint32_t address(int row, int unit) const {
    return smem_ + row * (kBlockCols * 4) + ((unit ^ (unit >> 3 & 1) ^ ((row & 3) << 1)) << 4);
  }
  // Columns col .. col + 7 of a row; col is a multiple of 8.
  __device__ __forceinline__ void load(int row, int col, float (&value)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 v = ptx::load_shared_16(address(row, col / 4 + half));
      value[4 * half] = v.x;
      value[4 * half + 1] = v.y;
      value[4 * half + 2] = v.z;
      value[4 * half + 3] = v.w;
    }
  }

 private:
  uint32_t smem_;
};

// bf16 operands on tensor cores: four warps, each 64x64 of the tile. A stage is 64 contraction
// elements.
template <Major kLhsMajor, Major kRhsMajor>
class MmaBf16 {
 public:
  using Element = __nv_bfloat16;
  static constexpr Major kLhs = kLhsMajor, kRhs = kRhsMajor;
  static constexpr int kThreads = 128;
  static constexpr int kBlocks = 2;  // a multiprocessor
  static constexpr int kDepth = kStageRowBytes / 2;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) acc_[i][j][k] = 0.0f;
      }
    }
  }

  __device__ MmaBf16() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // A fragment's four 8x8 matrices: of lhs, first both halves of the rows; of rhs, first both
    // halves of the contraction.
    const int r = lane % 8, low = lane / 8 % 2, high = lane / 16;
    lhs_ = place<kLhsMajor>(warp / 2 * 64, r, low, high);
    rhs_ = place<kRhsMajor>(warp % 2 * 64, r, high, low);
  }

  __device__ __forceinline__ void multiply(uint32_t lhs, uint32_t rhs) {
    lhs += lhs_;
    rhs += rhs_;
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      uint32_t a[4][4], b[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load<kLhsMajor>(a[i], lhs, i, step);
        load<kRhsMajor>(b[i], rhs, i, step);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::mma_bf16(acc_[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void stage(const StagedTile& tile) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 2 * 64 + lane / 4, unit = warp % 2 * 16 + lane % 4 / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::store_shared_v2(tile.address(row + 16 * i + 8 * half, unit + 2 * j) + lane % 2 * 8,
                               acc_[i][j][2 * half], acc_[i][j][2 * half + 1]);
        }
      }
    }
  }

 private:
  // What row r of the matrix in half `mn_half` of the first 16 rows (columns) of this warp, and
  // half `k_half` of the first 16 contraction elements, adds to a stage's address.
  template <Major kMajor>
  __device__ static __forceinline__ uint32_t place(int mn, int r, int mn_half, int k_half) {
    using Layout = StageLayout<Element, kMajor>;
    return kMajor == Major::kK ? Layout::offset(mn + 8 * mn_half + r, k_half)
                               : Layout::offset(8 * k_half + r, mn / 8 + mn_half);
  }

  // The fragment of the i-th 16 rows (columns) and the step-th 16 contraction elements. Two chunks
  // on is an XOR, since the chunk's number has been XORed with the row already.
  template <Major kMajor>
  __device__ static __forceinline__ void load(uint32_t (&fragment)[4], uint32_t address, int i,
                                              int step) {
    constexpr int kPitch = StageLayout<Element, kMajor>::kPitch;
    if constexpr (kMajor == Major::kK) {
      ptx::load_matrix_x4(fragment, (address ^ (2 * step << 4)) + 16 * i * kPitch);
    } else {
      ptx::load_matrix_x4_transposed(fragment, (address ^ (2 * i << 4)) + 16 * step * kPitch);
    }
  }

  uint32_t lhs_, rhs_;
  float acc_[4][8][4];  // 16 rows, 8 columns, the fragment
};

// float32 operands by FFMA, never TF32: 256 threads, each 8x8 of the tile. A stage is 32
// contraction elements.
template <Major kLhsMajor, Major kRhsMajor>
class FmaF32 {
 public:
  using Element = float;
  static constexpr Major kLhs = kLhsMajor, kRhs = kRhsMajor;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 1;  // a multiprocessor: two would leave 128 registers a thread
  static constexpr int kDepth = kStageRowBytes / 4;

  __device__ FmaF32()
      : row_(threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8),
        col_(threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) acc_[i][j] = 0.0f;
    }
  }

  // Fragments are loaded 16 bytes at a time along what is contiguous: four contraction elements of
  // one row (column), or four rows (columns) of one contraction element.
  __device__ __forceinline__ void multiply(uint32_t lhs, uint32_t rhs) {
#pragma unroll
    for (int step = 0; step < kDepth / 4; ++step) {
      if constexpr (kLhsMajor == Major::kK) {
        float a[8][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) load_row(a[i], lhs, row_, i, step);
        if constexpr (kRhsMajor == Major::kK) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            float b[4];
            load_row(b, rhs, col_, j, step);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int i = 0; i < 8; ++i) acc_[i][j] = fmaf(a[i][k], b[k], acc_[i][j]);
            }
          }
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float b[8];
            load_step(b, rhs, col_, 4 * step + k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
              for (int j = 0; j < 8; ++j) acc_[i][j] = fmaf(a[i][k], b[j], acc_[i][j]);
            }
          }
        }
      } else {
        static_assert(kRhsMajor == Major::kMn);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float a[8], b[8];
          load_step(a, lhs, row_, 4 * step + k);
          load_step(b, rhs, col_, 4 * step + k);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) acc_[i][j] = fmaf(a[i], b[j], acc_[i][j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void stage(const StagedTile& tile) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = index<kLhsMajor>(row_, i);
      if constexpr (kRhsMajor == Major::kK) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int col = index<kRhsMajor>(col_, j);
          ptx::store_shared_4(tile.address(row, col / 4) + col % 4 * 4, acc_[i][j]);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* v = acc_[i] + 4 * half;
          ptx::store_shared_16(tile.address(row, index<kRhsMajor>(col_, 4 * half) / 4),
                               __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                               __float_as_uint(v[3]));
        }
      }
    }
  }

 private:
  // The i-th of 8 rows (columns) of place 0 .. 15.
  template <Major kMajor>
  __device__ static __forceinline__ int index(int place, int i) {
    return kMajor == Major::kK ? place + 16 * i : i / 4 * 64 + place * 4 + i % 4;
  }

  // K-major: the `step`-th four contraction elements of the i-th row (column).
  __device__ static __forceinline__ void load_row(float (&value)[4], uint32_t stage, int place,
                                                  int i, int step) {
    using Layout = StageLayout<float, Major::kK>;
    load_4(value, ((stage + Layout::offset(place, 0)) ^ (step << 4)) + 16 * i * Layout::kPitch);
  }

  // MN-major: contraction element k of all 8 columns (rows).
  __device__ static __forceinline__ void load_step(float (&value)[8], uint32_t stage, int place,
                                                   int k) {
    constexpr int kPitch = StageLayout<float, Major::kMn>::kPitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4];
      load_4(part, ((stage + place * 16) ^ ((k & 7) << 4)) + k * kPitch + half * 256);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[4 * half + i] = part[i];
    }
  }

  __device__ static __forceinline__ void load_4(float (&value)[4], uint32_t address) {
    const float4 v = ptx::load_shared_16(address);
    value[0] = v.x;
    value[1] = v.y;
    value[2] = v.z;
    value[3] = v.w;
  }

  float acc_[8][8];
  int row_, col_;
};

}  // namespace dropless::cuda
