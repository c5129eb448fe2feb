// A block's tile of a product of bf16 operands on the tensor cores of every GPU since sm_80:
// multiplying stages in shared memory into accumulators, and handing these out as rows of fp32.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/stage_copy.cuh"

namespace dropless::cuda {

// Pieces of other work that are spread over the multiplication of a stage: the copies of lhs, those
// of rhs, and looking up coming rows.
inline constexpr int kParts = 3;

// Eight warps, two by four, of 64x64 each. 64x64 a warp, because ldmatrix then reads 4 KiB for 32
// products; 128x256 a block, because what it takes in from L2 then is three quarters of what two
// blocks of 128x128 do, and L2 is what limits those. A stage is 64 contraction elements.
// kMatrices: 2 if the columns of two matrices share the tile, 128 of each side by side; a warp then
// has 32 of each.
template <Major kLhsMajor, Major kRhsMajor, int kMatrices = 1>
class MmaBf16 {
 public:
  using Element = __nv_bfloat16;
  static constexpr Major kLhs = kLhsMajor, kRhs = kRhsMajor;
  static constexpr int kThreads = 256;
  static constexpr int kRows = 128, kCols = 256;
  static constexpr int kDepth = kStageRowBytes / 2;
  static constexpr int kSteps = kDepth / 16;
  static constexpr int kLhsBytes = kRows * kStageRowBytes;
  static constexpr int kStageBytes = (kRows + kCols) * kStageRowBytes;
  static constexpr int kMostStages = 4;
  // Handing rows out takes this much of one stage, so that the others may be filled meanwhile.
  static constexpr bool kStartsEarly = true;
  static constexpr int kWarpBytes = 16 * 64 * 4;
  static constexpr int kStagedBytes = kThreads / 32 * kWarpBytes;
  static constexpr int kWarpCols = 4;  // warps that share a row
  static_assert(kStagedBytes + kWarpCols * kRows * 4 <= kStageBytes);

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
    const int lane = threadIdx.x % 32;
    // A fragment's four 8x8 matrices: of lhs, first both halves of the rows; of rhs, first both
    // halves of the contraction.
    const int r = lane % 8, low = lane / 8 % 2, high = lane / 16;
    lhs_ = place<LhsLayout>(warp_row(), r, low, high);
    rhs_ = place<RhsLayout>(warp_col(), r, high, low) + kLhsBytes;
  }

  // Loads the fragments of a stage's first 16 contraction elements.
  __device__ __forceinline__ void begin(uint32_t stage) { load(stage, 0); }

  // Multiplies a stage whose first fragments are there. Those of the next 16 contraction elements
  // are always loaded one step ahead; the next stage's, after `arrive`, which makes it readable and
  // this one writable, and has the last products of this stage left to hide it. `part(i)` does the
  // i-th of kParts pieces of other work.
  template <class Part, class Arrive>
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t next, const Part& part,
                                           const Arrive& arrive) {
    static_assert(kSteps == kParts + 1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        arrive();
        load(next, 0);
      } else {
        load(stage, step + 1);
        part(step);
      }
      const auto& a = a_[step % 2];
      const auto& b = b_[step % 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::mma_bf16(acc_[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  // The first of the 8 columns of a matrix that this lane gets of a row, in the tile.
  __device__ __forceinline__ static int lane_col() { return warp_col() + threadIdx.x % kLanes * 8; }

  // Hands out the tile's rows, 8 columns of kMatrices matrices a lane: sink.load(i, row) first, for
  // the rows whose loads may be in flight together, then sink.store(i, row, values) for the same.
  // With kSums, what store returns is added up over a warp's columns into sums[kWarpCols][kRows].
  // Warps need not wait for each other.
  template <class Sink>
  __device__ __forceinline__ void hand_out(uint32_t smem, uint32_t sums, Sink& sink) const {
    constexpr int kPassRows = 32 / kLanes, kPasses = 16 / kPassRows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t own = smem + warp * kWarpBytes;
#pragma unroll 1  // the sink's code once
    for (int i = 0; i < 4; ++i) {
      const int in_group = lane / kLanes, first = warp_row() + 16 * i + in_group;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) sink.load(pass, first + pass * kPassRows);
      if (i == 0) stage<0>(own);
      if (i == 1) stage<1>(own);
      if (i == 2) stage<2>(own);
      if (i == 3) stage<3>(own);
      __syncwarp();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = first + pass * kPassRows;
        float value[kMatrices][8];
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          read(own, in_group + pass * kPassRows, m * 8 + lane % kLanes * 2, value[m]);
        }
        float sum = sink.store(pass, row, value);
        if constexpr (Sink::kSums) {
#pragma unroll
          for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
          if (lane % kLanes == 0) {
            ptx::store_shared_4(sums + (warp % kWarpCols * kRows + row) * 4, sum);
          }
        }
      }
      __syncwarp();
    }
  }

 private:
  static constexpr int kLanes = 8 / kMatrices;  // of a row
  using LhsLayout = StageLayout<Element, kLhsMajor, kRows>;
  using RhsLayout = StageLayout<Element, kRhsMajor, kCols>;

  __device__ __forceinline__ static int warp_row() { return threadIdx.x / 128 * 64; }
  __device__ __forceinline__ static int warp_col() {
    return threadIdx.x / 32 % kWarpCols * (64 / kMatrices);
  }

  // What row r of the matrix in half `mn_half` of the first 16 rows (columns) of this warp, and
  // half `k_half` of the first 16 contraction elements, adds to a stage's address.
  template <class Layout>
  __device__ static __forceinline__ uint32_t place(int mn, int r, int mn_half, int k_half) {
    return Layout::kMajorOf == Major::kK ? Layout::offset(mn + 8 * mn_half + r, k_half)
                                         : Layout::offset(8 * k_half + r, mn / 8 + mn_half);
  }

  // The fragment of the i-th 16 rows (columns) and the step-th 16 contraction elements; `skip` rows
  // (columns) further on. Two chunks on is an XOR, since the chunk's number has been XORed with the
  // row already.
  template <class Layout>
  __device__ static __forceinline__ void load(uint32_t (&fragment)[4], uint32_t address, int i,
                                              int skip, int step) {
    if constexpr (Layout::kMajorOf == Major::kK) {
      ptx::load_matrix_x4(fragment, (address ^ (2 * step << 4)) + (16 * i + skip) * Layout::kPitch);
    } else {
      ptx::load_matrix_x4_transposed(
          fragment, (address ^ (2 * i << 4)) + 16 * step * Layout::kPitch + skip * 2);
    }
  }
  __device__ __forceinline__ void load(uint32_t stage, int step) {
    constexpr int kRhsOfMatrix = 4 / kMatrices;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load<LhsLayout>(a_[step % 2][i], stage + lhs_, i, 0, step);
      load<RhsLayout>(b_[step % 2][i], stage + rhs_, i % kRhsOfMatrix, i / kRhsOfMatrix * 128,
                      step);
    }
  }

  // Address of 16-byte unit `unit` of a row of staged rows of 64 fp32. Swizzled so that neither
  // fragments' writes nor reads of two units a lane meet in a bank.
  __device__ __forceinline__ static uint32_t unit_address(uint32_t own, int row, int unit) {
    return own + row * 256 + ((unit ^ (unit >> 3 & 1) ^ ((row & 3) << 1)) << 4);
  }
  // This warp's i-th 16 rows.
  template <int i>
  __device__ __forceinline__ void stage(uint32_t own) const {
    const int row = threadIdx.x % 32 / 4, unit = threadIdx.x % 4 / 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared_v2(unit_address(own, row + 8 * half, unit + 2 * j) + threadIdx.x % 2 * 8,
                             acc_[i][j][2 * half], acc_[i][j][2 * half + 1]);
      }
    }
  }
  __device__ __forceinline__ static void read(uint32_t own, int row, int unit, float (&value)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 v = ptx::load_shared_16(unit_address(own, row, unit + half));
      value[4 * half] = v.x;
      value[4 * half + 1] = v.y;
      value[4 * half + 2] = v.z;
      value[4 * half + 3] = v.w;
    }
  }

  uint32_t lhs_, rhs_;
  uint32_t a_[2][4][4], b_[2][4][4];  // of two steps in turn
  float acc_[4][8][4];                // 16 rows, 8 columns, the fragment
};

}  // namespace dropless::cuda
