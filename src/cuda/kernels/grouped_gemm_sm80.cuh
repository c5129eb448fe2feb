// out[r] = lhs[r] * rhs[e(r)] for ragged groups of rows, on every GPU since sm_80: bf16 on tensor
// cores (grouped_gemm_sm80) or float32 by FFMA (grouped_gemm_f32), as Math says.
//
// Persistent blocks, one a multiprocessor. A block copies operands into a ring of stages with
// cp.async, rows gathered on the way where a map says so. Before it hands a finished tile's rows to
// the epilogue (epilogue_rows.cuh) it starts the next tile's copies. Rows past a group's end,
// columns and contraction elements that do not exist are zeros in shared memory and never read, so
// that any size and alignment works.
#pragma once

#include <cstdint>

#include "cuda/kernels/epilogue_rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/fma_tile.cuh"
#include "cuda/tile/mma_tile.cuh"
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
  int64_t lhs_plane_jump;  // bytes from behind the last step of a plane to the first of the next
  int64_t rhs_plane_jump;
  int access;  // bytes that all operands' addresses and rows are multiples of (StageCopy::copy)
  int stages;
  EpilogueParams epilogue;
};

// Stages of the ring: as many as fit, between these.
inline constexpr int kFewestStages = 2;
inline constexpr int kMostStages = 4;
// After the stages in shared memory: tables of operands' rows that coming stages copy, scalars of
// the tile's rows, and, where these have no place in a stage, sums of rows.
inline constexpr int kTableBytes = 4 * 128 * static_cast<int>(sizeof(int));
inline constexpr int kSumBytes = 128 * static_cast<int>(sizeof(float));
template <class Math>
constexpr int shared_bytes_of(int stages) {
  return stages * Math::kStageBytes + kTableBytes + (Math::kStartsEarly ? 0 : kSumBytes);
}

// Starts the copies of a tile's first stages - 1 steps; issue(stage, part) does one of the
// kParts pieces that start the copies of the next step.
template <class Math, class Issue>
__device__ __forceinline__ void start_stages(uint32_t smem, int stages, int steps, Issue&& issue) {
#pragma unroll 1
  for (int step = 0; step < stages - 1; ++step) {
    if (step < steps) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) issue(smem + step * Math::kStageBytes, part);
    }
    ptx::copy_async_commit();
  }
}

// Multiplies all steps of a tile whose copies have been started; a step's copies are issued
// stages - 1 steps ahead. All warps have read all stages once they meet at a barrier afterwards.
template <class Math, class Issue>
__device__ __forceinline__ void multiply_stages(Math& math, uint32_t smem, int stages, int steps,
                                                Issue&& issue) {
  if (steps == 0) return;
  // The oldest stage under way is readable afterwards, and the one before it has been read by all.
  const auto arrive = [&] {
    if (stages == 4) {
      ptx::copy_async_wait_group<2>();
    } else if (stages == 3) {
      ptx::copy_async_wait_group<1>();
    } else {
      ptx::copy_async_wait_group<0>();
    }
    __syncthreads();
  };
  uint32_t stage = smem, ahead = smem + (stages - 1) * Math::kStageBytes;
  const uint32_t end = smem + stages * Math::kStageBytes;
  arrive();
  math.begin(stage);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint32_t next = stage + Math::kStageBytes == end ? smem : stage + Math::kStageBytes;
    math.multiply(
        stage, next,
        [&](int part) {
          if (step + stages - 1 < steps) issue(ahead, part);
          if (part == kParts - 1) ptx::copy_async_commit();
        },
        arrive);
    stage = next;
    ahead = ahead + Math::kStageBytes == end ? smem : ahead + Math::kStageBytes;
  }
}

template <class Math, class Epilogue, bool kAligned>
class GroupedGemmSm80 {
 public:
  using Params = RowProductParams<typename Epilogue::Params>;
  using Element = typename Math::Element;
  static constexpr int kThreads = Math::kThreads;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  // Columns of one matrix that a tile covers: half of it if gate and up stand side by side.
  static constexpr int kTileCols = Math::kCols / Epilogue::kMatrices;
  using Scheduler = RowTileScheduler<GemmTile<Math::kRows, kTileCols, kMostStages, 1, false>>;

  __device__ GroupedGemmSm80(const Params& params, uint8_t* smem)
      : params_(params),
        smem_(ptx::shared_address(smem)),
        staged_(Math::kStartsEarly ? smem_ + (params.stages - 1) * Math::kStageBytes : smem_),
        tables_(smem + params.stages * Math::kStageBytes),
        steps_((params.depth + Math::kDepth - 1) / Math::kDepth * params.planes) {}

  __device__ void run() {
    zero_outside();
    Scheduler tiles(params_.offsets, params_.experts, params_.rows, params_.cols, 0);
    int item = blockIdx.x, turn = 0;
    RowTile tile, next;
    if (!tiles.find(item, tile)) return;
    write_row(turn, look_up(tile));
    __syncthreads();
    if (Math::kStartsEarly) start(tile, turn);
    while (true) {
      if (!Math::kStartsEarly) start(tile, turn);
      const bool more = tiles.find(item += gridDim.x, next);
      const RowEntry entry = more ? look_up(next) : RowEntry();
      Math math;
      math.clear();
      multiply_stages(math, smem_, params_.stages, steps_,
                      Source(*this, tile, turn, params_.stages - 1));
      write_row(turn ^ 1, entry);
      __syncthreads();
      if (Math::kStartsEarly && more) start(next, turn ^ 1);
      finish(math, tile, turn);
      if (!more) return;
      if (!Math::kStartsEarly) __syncthreads();
      tile = next;
      turn ^= 1;
    }
  }

 private:
  using LhsCopy = StageCopy<Element, Math::kLhs, Math::kRows, kThreads>;
  using RhsCopy = StageCopy<Element, Math::kRhs, Math::kCols, kThreads>;
  static_assert(Math::kLhs == Major::kK && kThreads == 2 * Math::kRows && Math::kRows == 128);
  static constexpr bool kPair = Epilogue::kMatrices == 2;

  // What one thread finds out about one row of a tile: the lower half of the block which row of lhs
  // it is, the upper half what the epilogue wants to know.
  struct RowEntry {
    int found = -1;
    float scalar = 0.0f;
  };
  __device__ __forceinline__ RowEntry look_up(const RowTile& tile) const {
    RowEntry entry;
    const int r = static_cast<int>(threadIdx.x) % Math::kRows;
    if (r >= tile.rows) return entry;
    if (threadIdx.x < Math::kRows) {
      entry.found = params_.map.look_up(tile.row + r);
    } else if constexpr (requires { Epilogue::scalar(params_.epilogue, 0); }) {
      entry.scalar = Epilogue::scalar(params_.epilogue, tile.row + r);
    }
    return entry;
  }
  __device__ __forceinline__ void write_row(int turn, const RowEntry& entry) const {
    const int r = static_cast<int>(threadIdx.x) % Math::kRows;
    if (threadIdx.x < Math::kRows) {
      lhs_rows(turn)[LhsCopy::place(r)] = entry.found < 0 ? -1 : params_.map.resolve(entry.found);
    } else {
      scalars(turn)[r] = entry.scalar;
    }
  }
  __device__ __forceinline__ int* lhs_rows(int turn) const {
    return reinterpret_cast<int*>(tables_) + turn * Math::kRows;
  }
  __device__ __forceinline__ float* scalars(int turn) const {
    return reinterpret_cast<float*>(tables_) + (2 + turn) * Math::kRows;
  }

  __device__ __forceinline__ void start(const RowTile& tile, int turn) const {
    start_stages<Math>(smem_, params_.stages, steps_, Source(*this, tile, turn, 0));
  }

  __device__ __forceinline__ void finish(const Math& math, const RowTile& tile, int turn) const {
    const uint32_t sums = Math::kStartsEarly ? staged_ + Math::kStagedBytes
                                             : ptx::shared_address(tables_ + kTableBytes);
    const auto hand_out = [&]<bool kPlainSilu>() {
      typename Epilogue::template Sink<kAligned, kPlainSilu> sink(params_.epilogue, tile,
                                                                  Math::lane_col(), scalars(turn));
      math.hand_out(staged_, sums, sink);
    };
    Epilogue::dispatch(params_.epilogue, hand_out);
    if constexpr (requires { Epilogue::store_sum(params_.epilogue, 0, 0, 0.0f); }) {
      __syncthreads();
      const int r = threadIdx.x;
      if (r >= tile.rows) return;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Math::kWarpCols; ++i) {
        sum += ptx::load_shared_4(sums + (i * Math::kRows + r) * 4);
      }
      Epilogue::store_sum(params_.epilogue, tile.row + r, tile.col / Math::kCols, sum);
    }
  }

  // Copies the stages of one tile, from some step on.
  class Source {
   public:
    __device__ __forceinline__ Source(const GroupedGemmSm80& kernel, const RowTile& tile, int turn,
                                      int step)
        : p_(kernel.params_), tile_(tile) {
      lhs_.rows(ptx::shared_address(kernel.lhs_rows(turn)), lhs_rows_);
      const int blocks = kernel.steps_ / p_.planes, plane = step >= blocks;
      const int k = (step - plane * blocks) * Math::kDepth;
      left_ = p_.depth - k;
      lhs_from_ = p_.lhs + plane * p_.lhs_plane_bytes + int64_t{k} * kSize;
      // Where columns are contiguous, a thread copies those of one matrix only.
      const bool second = kPair ? !kTwo && rhs_.element() >= kTileCols : plane == 1;
      int64_t row = kRhsK ? tile.col : k, col = kRhsK ? k : first_col();
      if (kAligned) {  // where this thread starts
        lhs_from_ += lhs_.element() * kSize;
        row += rhs_.row(0);
        col += rhs_.element();
      }
      const int64_t skip = tile.expert * p_.rhs_matrix_bytes + row * p_.rhs_row_bytes + col * kSize;
      rhs_from_[0] = p_.rhs[second] + skip;
      if (kTwo) rhs_from_[1] = p_.rhs[1] + skip;
    }

    __device__ __forceinline__ void operator()(uint32_t stage, int part) {
      if (part == 0) copy_lhs(stage);
      if (part == 1) copy_rhs(stage + Math::kLhsBytes);
      if (part != 2) return;
      const uint32_t skip = kRhsK ? kStageRowBytes : Math::kDepth * p_.rhs_row_bytes;
      lhs_from_ += kStageRowBytes;
      rhs_from_[0] += skip;
      if (kTwo) rhs_from_[1] += skip;
      left_ -= Math::kDepth;
      if (left_ > 0) return;
      left_ = p_.depth;
      lhs_from_ += p_.lhs_plane_jump;
      rhs_from_[0] += p_.rhs_plane_jump;
    }

   private:
    static constexpr bool kRhsK = Math::kRhs == Major::kK;
    static constexpr bool kTwo = kPair && kRhsK;  // matrices that a thread copies

    // The column of the matrix that stands at the tile's place 0 as this thread sees it.
    __device__ __forceinline__ int first_col() const {
      return kPair && rhs_.element() >= kTileCols ? tile_.col - kTileCols : tile_.col;
    }
    // Does the row of the rhs stage exist that this thread's i-th chunk is in.
    __device__ __forceinline__ bool has_row(int i) const {
      return kRhsK ? tile_.col + rhs_.row(i) % kTileCols < p_.cols : rhs_.row(i) < left_;
    }
    // Elements from this thread's first one on that exist in a row of the rhs stage.
    __device__ __forceinline__ int rhs_count() const {
      return (kRhsK ? left_ : p_.cols - first_col()) - rhs_.element();
    }

    __device__ __forceinline__ void copy_lhs(uint32_t stage) const {
      const int count = left_ - lhs_.element();
      if (kAligned) {
        lhs_.copy_rows(stage, lhs_from_, p_.lhs_row_bytes, lhs_rows_, count > 0);
      } else {
        lhs_.copy(stage, {lhs_from_, lhs_from_}, p_.lhs_row_bytes, lhs_rows_, count, p_.access);
      }
    }

    __device__ __forceinline__ void copy_rhs(uint32_t stage) const {
      if constexpr (kAligned) {
        const uint32_t step = RhsCopy::kRowStep * p_.rhs_row_bytes;
        constexpr int kHalf = RhsCopy::kCount / 2;
        const uint8_t* upper = kTwo ? rhs_from_[1] : rhs_from_[0] + uint64_t{step} * kHalf;
        if (left_ >= Math::kDepth && tile_.col + kTileCols <= p_.cols) {
          rhs_.copy_all(stage, rhs_from_[0], upper, step);
        } else {
          const uint8_t* low = rhs_from_[0];
          rhs_.copy_some(stage, [&](int i, const uint8_t*& from) {
            from = i < kHalf ? low + uint64_t{step} * i : upper + uint64_t{step} * (i - kHalf);
            return has_row(i) && rhs_count() > 0;
          });
        }
      } else {
        int rows[RhsCopy::kCount];
#pragma unroll
        for (int i = 0; i < RhsCopy::kCount; ++i) {
          rows[i] = has_row(i) ? rhs_.row(i) % (kRhsK ? kTileCols : Math::kDepth) : -1;
        }
        rhs_.copy(stage, {rhs_from_[0], rhs_from_[kTwo]}, p_.rhs_row_bytes, rows, rhs_count(),
                  p_.access);
      }
    }

    const Params& p_;
    const RowTile& tile_;
    const LhsCopy lhs_;
    const RhsCopy rhs_;
    int lhs_rows_[LhsCopy::kCount];
    int left_;  // contraction elements of this plane from the next step on
    const uint8_t* lhs_from_;
    const uint8_t* rhs_from_[2];
  };

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
  const uint32_t staged_;  // where tiles' rows are handed out
  // Two turns of the tile's rows of lhs, -1 where there is none; then of the rows' scalars.
  uint8_t* const tables_;
  const int steps_;
};

template <class Math, class Epilogue, bool kAligned>
__global__ void __launch_bounds__(Math::kThreads, 1) grouped_gemm_sm80_kernel(
    const __grid_constant__ RowProductParams<typename Epilogue::Params> params) {
  extern __shared__ __align__(128) uint8_t smem[];
  GroupedGemmSm80<Math, Epilogue, kAligned>(params, smem).run();
}

}  // namespace dropless::cuda
