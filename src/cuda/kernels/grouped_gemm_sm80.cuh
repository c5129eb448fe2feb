// out[r] = lhs[r] * rhs[e(r)] for ragged groups of rows, on every GPU since sm_80: bf16 on tensor
// cores (grouped_gemm_sm80) or float32 by FFMA (grouped_gemm_f32), as Math says.
//
// Persistent blocks, two a multiprocessor, so that one multiplies while the other one stores. A
// block copies operands into a ring of stages with cp.async, rows gathered on the way where a map
// says so, and turns its finished tile around in the stages' memory for the epilogue
// (epilogue_rows.cuh). Rows past a group's end, columns and contraction elements that do not exist
// are zeros in shared memory and never read, so that any size and alignment works.
#pragma once

#include <cstdint>

#include "cuda/kernels/epilogue_rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/block_math.cuh"
#include "cuda/tile/row_map.cuh"
#include "cuda/tile/stage_copy.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

template <class EpilogueParams>
struct RowProductParams {
  const uint8_t* lhs;  // planes of [M, Kc], or of [T, Kc] if gathered
  int64_t lhs_plane_bytes;
  const uint8_t* rhs[2];  // [E, Kc, N] or [E, N, Kc]: one a plane of lhs, or gate and up
  int64_t rhs_matrix_bytes;
  uint32_t lhs_row_bytes;
  uint32_t rhs_row_bytes;
  RowMap map;
  const int32_t* offsets;  // [E+1]
  int experts;
  int rows;    // M
  int cols;    // N; of one matrix if gate and up stand side by side
  int depth;   // Kc of one plane
  int planes;  // 1, or 2: the contraction runs over both planes of lhs, each with its own rhs
  int access;  // bytes that all operands' addresses and rows are multiples of (StageCopy::copy)
  int stages;
  EpilogueParams epilogue;
};

// Stages of the ring: three where two blocks then fit a multiprocessor, else two.
inline constexpr int kMostStages = 3;
// Rows of operands in shared memory after the stages: which ones the coming stages copy.
inline constexpr int kRowTableBytes = 4 * 128 * static_cast<int>(sizeof(int));
inline constexpr int shared_bytes_of(int stages) { return stages * kStageBytes + kRowTableBytes; }
static_assert(2 * kStageBytes >= StagedTile::kBytes);

// Copies and multiplies `steps` stages of a ring of `stages`; issue(step, stage) starts the copies
// of one. A step's copies are issued stages - 1 steps ahead.
template <class Math, class Issue>
__device__ __forceinline__ void multiply_stages(Math& math, uint32_t smem, int stages, int steps,
                                                const Issue& issue) {
  for (int step = 0; step < stages - 1; ++step) {
    if (step < steps) issue(step, smem + step * kStageBytes);
    ptx::copy_async_commit();
  }
  uint32_t stage = smem, ahead = smem + (stages - 1) * kStageBytes;
  const uint32_t end = smem + stages * kStageBytes;
  for (int step = 0; step < steps; ++step) {
    if (stages == kMostStages) {
      ptx::copy_async_wait_group<kMostStages - 2>();
    } else {
      ptx::copy_async_wait_group<0>();
    }
    __syncthreads();  // this stage has arrived, and the one before it has been read by all
    if (step + stages - 1 < steps) issue(step + stages - 1, ahead);
    ptx::copy_async_commit();
    math.multiply(stage, stage + kStageOperandBytes);
    stage = stage + kStageBytes == end ? smem : stage + kStageBytes;
    ahead = ahead + kStageBytes == end ? smem : ahead + kStageBytes;
  }
  ptx::copy_async_wait_group<0>();
  __syncthreads();
}

template <class Math, class Epilogue>
class GroupedGemmSm80 {
 public:
  using Params = RowProductParams<typename Epilogue::Params>;
  using Element = typename Math::Element;
  static constexpr int kThreads = Math::kThreads;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  // Columns of one matrix that a tile covers: half of it if gate and up stand side by side.
  static constexpr int kTileCols = kBlockCols / Epilogue::kMatrices;
  using Scheduler = RowTileScheduler<GemmTile<kBlockRows, kTileCols, kMostStages, 1, false>>;

  __device__ GroupedGemmSm80(const Params& params, uint8_t* smem)
      : params_(params),
        smem_(ptx::shared_address(smem)),
        lhs_rows_(reinterpret_cast<int*>(smem + params.stages * kStageBytes)) {}

  __device__ void run() {
    zero_outside();
    Scheduler tiles(params_.offsets, params_.experts, params_.rows, params_.cols, 0);
    RowTile tile;
    for (int item = blockIdx.x; tiles.find(item, tile); item += gridDim.x) {
      Math math;
      multiply(math, tile);
      const StagedTile staged(smem_);
      math.stage(staged);
      __syncthreads();
      Epilogue::template store<kThreads>(params_.epilogue, staged, tile);
      __syncthreads();
    }
  }

 private:
  using LhsCopy = StageCopy<Element, Math::kLhs, kThreads>;
  using RhsCopy = StageCopy<Element, Math::kRhs, kThreads>;
  static_assert(Math::kLhs == Major::kK);
  static constexpr bool kPair = Epilogue::kMatrices == 2;

  __device__ __forceinline__ void multiply(Math& math, const RowTile& tile) const {
    for (int r = threadIdx.x; r < kBlockRows; r += kThreads) {
      lhs_rows_[r] = r < tile.rows ? params_.map.row(tile.row + r) : -1;
    }
    __syncthreads();
    const LhsCopy lhs;
    const RhsCopy rhs;
    const uint8_t* matrix[2];
    const int rhs_first = first_matrices(tile, rhs, matrix);
    const int blocks = (params_.depth + Math::kDepth - 1) / Math::kDepth;
    math.clear();
    const auto issue = [&](int step, uint32_t stage) {
      const int plane = step >= blocks;
      const int k = (step - plane * blocks) * Math::kDepth;
      const uint8_t* from = params_.lhs + plane * params_.lhs_plane_bytes + int64_t{k} * kSize;
      int rows[LhsCopy::kCount];
#pragma unroll
      for (int i = 0; i < LhsCopy::kCount; ++i) rows[i] = lhs_rows_[lhs.row(i)];
      lhs.copy(stage, {from, from}, params_.lhs_row_bytes, rows, params_.depth - k - lhs.element(),
               params_.access);
      copy_rhs(rhs, stage + kStageOperandBytes, matrix, plane, rhs_first, k);
    };
    multiply_stages(math, smem_, params_.stages, blocks * params_.planes, issue);
  }

  // Where this thread's columns come from: the tile's expert's matrices, and the tile's first
  // column. Where columns are contiguous and gate and up share the tile, a thread copies columns of
  // one of them only; its first column is such that adding the place in the tile gives the column.
  __device__ __forceinline__ int first_matrices(const RowTile& tile, const RhsCopy& rhs,
                                                const uint8_t* (&matrix)[2]) const {
    const int64_t skip = tile.expert * params_.rhs_matrix_bytes;
    matrix[0] = params_.rhs[0] + skip;
    matrix[1] = params_.rhs[1] + skip;
    if constexpr (Math::kRhs == Major::kK) return tile.col;
    const bool second = kPair && rhs.element() >= kTileCols;
    const int first = second ? tile.col - kTileCols : tile.col;
    if (second) matrix[0] = matrix[1];
    matrix[0] += int64_t{first} * kSize;
    matrix[1] += int64_t{first} * kSize;
    return first;
  }

  __device__ __forceinline__ void copy_rhs(const RhsCopy& rhs, uint32_t stage,
                                           const uint8_t* const (&matrix)[2], int plane, int first,
                                           int k) const {
    int rows[RhsCopy::kCount];
    const uint8_t* one = kPair || plane == 0 ? matrix[0] : matrix[1];
    if constexpr (Math::kRhs == Major::kK) {
      const int64_t skip = int64_t{k} * kSize;
#pragma unroll
      for (int i = 0; i < RhsCopy::kCount; ++i) {
        const int col = first + rhs.row(i) % kTileCols;
        rows[i] = col < params_.cols ? col : -1;
      }
      rhs.copy(stage, {one + skip, (kPair ? matrix[1] : one) + skip}, params_.rhs_row_bytes, rows,
               params_.depth - k - rhs.element(), params_.access);
    } else {
#pragma unroll
      for (int i = 0; i < RhsCopy::kCount; ++i) {
        const int row = k + rhs.row(i);
        rows[i] = row < params_.depth ? row : -1;
      }
      rhs.copy(stage, {one, one}, params_.rhs_row_bytes, rows, params_.cols - first - rhs.element(),
               params_.access);
    }
  }

  // Rows of no group become 0: the warps of all blocks share them.
  __device__ void zero_outside() const {
    constexpr int kWarps = kThreads / 32;
    const int begin = min(max(params_.offsets[0], 0), params_.rows);
    const int end = min(max(params_.offsets[params_.experts], begin), params_.rows);
    const int outside = begin + params_.rows - end;
    for (int i = blockIdx.x * kWarps + threadIdx.x / 32; i < outside; i += gridDim.x * kWarps) {
      Epilogue::zero_row(params_.epilogue, i < begin ? i : end + (i - begin), threadIdx.x % 32);
    }
  }

  const Params& params_;
  const uint32_t smem_;
  int* const lhs_rows_;  // [kBlockRows] of this tile, -1 where there is none
};

template <class Math, class Epilogue>
__global__ void __launch_bounds__(Math::kThreads, Math::kBlocks) grouped_gemm_sm80_kernel(
    const __grid_constant__ RowProductParams<typename Epilogue::Params> params) {
  extern __shared__ __align__(128) uint8_t smem[];
  GroupedGemmSm80<Math, Epilogue>(params, smem).run();
}

}  // namespace dropless::cuda
