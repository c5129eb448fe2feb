// As mma_tile.cuh, for float32 operands by FFMA, never TF32.
#pragma once

#include <cstdint>

#include "cuda/tile/mma_tile.cuh"

namespace dropless::cuda {

// A tile of 128x128 as fp32 rows in shared memory.
class StagedTile {
 public:
  static constexpr int kBytes = 128 * 128 * 4;

  __device__ explicit StagedTile(uint32_t smem) : smem_(smem) {}

  // Address of 16-byte unit `unit` of a row. Swizzled so that neither fragments' writes nor reads
  // of two units a lane meet in a bank.
  __device__ __forceinline__ uint32_t address(int row, int unit) const {
    return smem_ + row * (128 * 4) + ((unit ^ (unit >> 3 & 1) ^ ((row & 3) << 1)) << 4);
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

// 256 threads, each 8x8 of the tile; 64 columns of each matrix where two share it. A stage is 32
// contraction elements.
template <Major kLhsMajor, Major kRhsMajor, int kMatrices = 1>
class FmaF32 {
 public:
  using Element = float;
  static constexpr Major kLhs = kLhsMajor, kRhs = kRhsMajor;
  static constexpr int kThreads = 256;
  static constexpr int kRows = 128, kCols = 128;
  static constexpr int kDepth = kStageRowBytes / 4;
  static constexpr int kLhsBytes = kRows * kStageRowBytes;
  static constexpr int kStageBytes = (kRows + kCols) * kStageRowBytes;
  static constexpr int kMostStages = 3;
  static constexpr bool kStartsEarly = false;  // staged rows take the place of two stages
  static constexpr int kStagedBytes = StagedTile::kBytes;
  static constexpr int kWarpCols = 1;

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
  __device__ __forceinline__ void begin(uint32_t) {}

  template <class Part, class Arrive>
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t, const Part& part,
                                           const Arrive& arrive) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) part(i);
    multiply(stage, stage + kLhsBytes);
    arrive();
  }

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

  __device__ __forceinline__ static int lane_col() { return threadIdx.x % kLanes * 8; }

  // As MmaBf16 does, but blocks of threads wait for each other.
  template <class Sink>
  __device__ __forceinline__ void hand_out(uint32_t smem, uint32_t sums, Sink& sink) const {
    constexpr int kPassRows = kThreads / kLanes, kPasses = kMatrices == 1 ? 4 : 2;
    const StagedTile tile(smem);
    stage(tile);
    __syncthreads();
#pragma unroll 1
    for (int first = threadIdx.x / kLanes; first < kRows; first += kPasses * kPassRows) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) sink.load(pass, first + pass * kPassRows);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = first + pass * kPassRows;
        float value[kMatrices][8];
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) tile.load(row, m * 64 + lane_col(), value[m]);
        float sum = sink.store(pass, row, value);
        if constexpr (Sink::kSums) {
#pragma unroll
          for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
          if (threadIdx.x % kLanes == 0) ptx::store_shared_4(sums + row * 4, sum);
        }
      }
    }
  }

 private:
  static constexpr int kLanes = 16 / kMatrices;  // of a row

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

  // The i-th of 8 rows (columns) of place 0 .. 15.
  template <Major kMajor>
  __device__ static __forceinline__ int index(int place, int i) {
    return kMajor == Major::kK ? place + 16 * i : i / 4 * 64 + place * 4 + i % 4;
  }

  // K-major: the `step`-th four contraction elements of the i-th row (column).
  __device__ static __forceinline__ void load_row(float (&value)[4], uint32_t stage, int place,
                                                  int i, int step) {
    using Layout = StageLayout<float, Major::kK, 128>;
    load_4(value, ((stage + Layout::offset(place, 0)) ^ (step << 4)) + 16 * i * Layout::kPitch);
  }

  // MN-major: contraction element k of all 8 columns (rows).
  __device__ static __forceinline__ void load_step(float (&value)[8], uint32_t stage, int place,
                                                   int k) {
    constexpr int kPitch = StageLayout<float, Major::kMn, 128>::kPitch;
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
