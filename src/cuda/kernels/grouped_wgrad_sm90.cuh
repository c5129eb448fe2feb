// dw[p][e] (+)= sum over the rows r of expert e of outer(x[r], dy[r, p]), bf16 operands, for
// sm_90a.
//
// A product whose contraction runs over a group's rows. Both operands are read as they lie, rows
// outermost: wgmma takes MN-major operands of bf16, so nothing is transposed. Roles and pipeline
// are those of grouped_gemm_sm90.cuh; every expert has the same tiles, and an empty expert's tiles
// are stored as zeros.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/tile/gathered_rows.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/result.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

struct alignas(128) GroupedWgradParams {
  CUtensorMap x;           // [M, Kc]
  CUtensorMap dy;          // P planes of [M, N]
  RowSource source;        // in the place of x or dy if its rows are gathered
  ResultMatrix dw[2];      // P of them: E planes of [Kc, N]
  const int32_t* offsets;  // [E+1]
  int experts;
  int contraction;  // M
  int rows;         // Kc
  int cols;         // N
  int planes;       // P
};

template <class Tile, class Out, bool kAccumulate, Gathered kGathered = Gathered::kNone>
class GroupedWgradSm90 {
 public:
  using Params = GroupedWgradParams;
  using Ring = Stages<Tile, Major::kMn, Major::kMn, kGathered>;
  using Scheduler = WeightTileScheduler<Tile>;
  using Staging = ResultStagingOf<Tile>;
  // Blocks of 64 rows that one warpgroup works on.
  static constexpr int kRowTiles = Tile::kPingpong ? Tile::kRows / kChunk : 1;
  static_assert(Tile::kPingpong || Tile::kRows == 2 * kChunk);
  // In turns the other warpgroup's products hide a tile's stores. Together nothing would, so they
  // wait for the next tile's first products; float32 results would need twice the registers.
  static constexpr bool kDeferred = !Tile::kPingpong && std::is_same_v<Out, __nv_bfloat16>;
  static constexpr int kSteps = Tile::kCols / kResultCols<Out>;  // of storing a tile
  static constexpr int kSharedBytes = Tile::kStages * Tile::kStageBytes + 2 * Staging::kBytes +
                                      Ring::kBarriers * static_cast<int>(sizeof(uint64_t));

  __device__ GroupedWgradSm90(const Params& params, uint8_t* smem)
      : params_(params),
        rank_(Tile::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank())),
        staging_(smem + Tile::kStages * Tile::kStageBytes),
        ring_(smem, staging_ + 2 * Staging::kBytes) {}

  __device__ void run() {
    // The same for all lanes, which the compiler does not know of threadIdx.x: branches on it would
    // count as divergent, and addresses would be made in every lane.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (threadIdx.x == 0) ring_.init();
    if (Tile::kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    if (warpgroup == 2) {
      ptx::register_decrease<kProducerRegisters>();
      if constexpr (kGathered != Gathered::kNone) {
        produce_gathered();
      } else {
        if (threadIdx.x % kWarpgroup == 0) produce();
        __syncwarp();
      }
    } else {
      ptx::register_increase<kConsumerRegisters>();
      consume(warpgroup);
    }
    if (Tile::kCluster > 1) ptx::cluster_sync();
  }

 private:
  __device__ int first_item() const { return blockIdx.x / Tile::kCluster; }
  __device__ int item_step() const { return gridDim.x / Tile::kCluster; }
  __device__ Scheduler scheduler() const {
    return Scheduler(params_.offsets, params_.experts, params_.contraction, params_.rows,
                     params_.cols, params_.planes, rank_);
  }

  __device__ void produce() {
    ptx::prefetch_tensor_map(&params_.x);
    ptx::prefetch_tensor_map(&params_.dy);
    const Scheduler tiles = scheduler();
    typename Ring::State state;
    WeightTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      for (int k = 0; k < tile.depth; k += kChunk) {
        ring_.await_free(state);
        ring_.announce(state.stage);
        load_lhs(state.stage, tile, k);
        load_rhs(state.stage, tile, k);
        state.advance();
      }
    }
  }

  // The blocks of rows that this block's tiles contract over, in order.
  class RowBlocks {
   public:
    __device__ RowBlocks(const Scheduler& tiles, int item, int step)
        : tiles_(tiles), item_(item - step), step_(step) {
      next();
    }
    __device__ int first() const { return tile_.first + k_; }
    __device__ int rows() const { return tile_.depth - k_; }  // at most 0 after the last block
    __device__ __forceinline__ void next() {
      k_ += kChunk;
      while (k_ >= tile_.depth && !done_) {
        item_ += step_;
        k_ = 0;
        done_ = !tiles_.find(item_, tile_);
      }
    }

   private:
    const Scheduler& tiles_;
    int item_;
    const int step_;
    WeightTile tile_ = {};
    int k_ = -kChunk;
    bool done_ = false;
  };

  // All four warps copy rows; one thread sees to the other operand. Slots are read two blocks
  // ahead: the loading threads could never catch up if each block waited for its own.
  __device__ void produce_gathered() {
    constexpr bool kLeft = kGathered == Gathered::kLhs;
    constexpr int kChunks = (kLeft ? Tile::kRows : Tile::kCols) / kChunk;
    const int thread = threadIdx.x % kWarpgroup;
    const Scheduler tiles = scheduler();
    GatheredRows<kChunk, 2> rows(params_.source, thread);
    RowBlocks ahead(tiles, first_item(), item_step());
    rows.template read_slots<0>(ahead.first(), ahead.rows());
    ahead.next();
    rows.template read_slots<1>(ahead.first(), ahead.rows());
    bool odd = false;
    typename Ring::State state;
    WeightTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      // Units of 16 bytes, 8 elements: of the plane's end and of the tile's first column.
      const int width = (kLeft ? params_.rows : params_.cols) / 8;
      const int first = kLeft ? tile.row / 8 : tile.plane * width + tile.col / 8;
      const int end = kLeft ? width : (tile.plane + 1) * width;
      for (int k = 0; k < tile.depth; k += kChunk, odd = !odd) {
        ahead.next();
        if (odd) {
          rows.template find_rows<1>();
          rows.template read_slots<1>(ahead.first(), ahead.rows());
        } else {
          rows.template find_rows<0>();
          rows.template read_slots<0>(ahead.first(), ahead.rows());
        }
        ring_.await_free(state);
        if (thread == 0) {
          ring_.announce(state.stage);
          if (kLeft) {
            load_rhs(state.stage, tile, k);
          } else {
            load_lhs(state.stage, tile, k);
          }
        }
        uint8_t* smem = kLeft ? ring_.lhs(state.stage) : ring_.rhs(state.stage);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          rows.copy(smem + chunk * kChunkBytes, first + chunk * kChunkUnits, end);
        }
        ring_.arrive_when_copied(state.stage);
        state.advance();
      }
    }
  }

  __device__ __forceinline__ void load_lhs(int stage, const WeightTile& tile, int k) const {
    load_chunks<Major::kMn, Tile::kRows / kChunk, Tile::kCluster>(
        ring_.lhs(stage), &params_.x, ring_.full + stage, tile.row, tile.first + k, 0,
        tile.shares_rows, rank_);
  }

  __device__ __forceinline__ void load_rhs(int stage, const WeightTile& tile, int k) const {
    load_chunks<Major::kMn, Tile::kCols / kChunk, Tile::kCluster>(
        ring_.rhs(stage), &params_.dy, ring_.full + stage, tile.col, tile.first + k, tile.plane,
        !tile.shares_rows, rank_);
  }

  // Results of 64 rows that wait to be stored, rounded: two columns a register.
  struct Pending {
    uint32_t pairs[kDeferred ? Tile::kCols / 4 : 1];
    WeightTile tile;  // `present` says whether any wait
  };

  struct StorePending {
    const GroupedWgradSm90& kernel;
    const Pending& pending;
    Staging& staging;
    template <class Index>
    __device__ __forceinline__ void operator()(Index index) const {
      if constexpr (kDeferred) {
        const WeightTile& tile = pending.tile;
        if (!tile.present) return;
        staging.write_pairs([&](int i) { return pending.pairs[index.value * 16 + i]; });
        staging.template send<Out>(kernel.params_.dw[tile.plane],
                                   tile.col + index.value * kResultCols<Out>, tile.row, tile.expert,
                                   kChunk);
      }
    }
  };

  __device__ void consume(int warpgroup) {
    const int thread = threadIdx.x % kWarpgroup;
    Staging staging(staging_ + warpgroup * Staging::kBytes, warpgroup);
    const Scheduler tiles = scheduler();
    typename Ring::State state;
    Pending pending;
    pending.tile.present = false;
    WeightTile tile;
    int n = 0;
    for (int item = first_item(); tiles.find(item, tile); item += item_step(), ++n) {
      const int blocks = (tile.depth + kChunk - 1) / kChunk;
      if (Tile::kPingpong && n % 2 != warpgroup) {
        state.advance(blocks);
        continue;
      }
      const int chunk = Tile::kPingpong ? 0 : warpgroup;
      tile.row += chunk * kChunk;
      if (Tile::kPingpong) ring_.await_turn(warpgroup, n / 2);
      if (!tile.present || tile.row >= params_.rows || blocks == 0) {
        ring_.drain(state, blocks, warpgroup, thread);
        if (Tile::kPingpong) ring_.pass_turn(warpgroup, thread);
        if (tile.present && !kAccumulate) store_zero(tile, staging);
      } else {
        multiply_and_store(tile, warpgroup, chunk, blocks, state, staging, pending);
      }
    }
    if (kDeferred) for_each_index<kSteps>(StorePending{*this, pending, staging});
    staging.finish();
  }

  __device__ __forceinline__ void multiply_and_store(const WeightTile& tile, int warpgroup,
                                                     int chunk, int blocks,
                                                     typename Ring::State& state, Staging& staging,
                                                     Pending& pending) const {
    const int thread = threadIdx.x % kWarpgroup;
    float acc[kRowTiles][Tile::kCols / 2];
    // Of the last block only the steps that reach a row of the group.
    const int last_rows = tile.depth - (blocks - 1) * kChunk;
    const int last_steps = (last_rows + kStep - 1) / kStep;
    ring_.template multiply<kDeferred ? kSteps : 0>(
        acc, state, blocks, chunk, thread, last_steps,
        [&](int block, int stage) {
          if (block == blocks - 1 && last_rows < last_steps * kStep) {
            ring_.template zero_tail<kRowTiles>(stage, last_rows, last_steps * kStep, chunk, thread,
                                                kWarpgroupBarrier + warpgroup);
          }
        },
        [&](int block) {
          if (Tile::kPingpong && block == blocks - 1) ring_.pass_turn(warpgroup, thread);
        },
        StorePending{*this, pending, staging});
    if constexpr (kDeferred) {
      if constexpr (kAccumulate) add_old(acc[0], params_.dw[tile.plane], tile, tile.row, thread);
#pragma unroll
      for (int i = 0; i < Tile::kCols / 4; ++i) {
        pending.pairs[i] = ptx::pack_bf16(acc[0][2 * i], acc[0][2 * i + 1]);
      }
      pending.tile = tile;
    } else {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) store(acc[i], tile, tile.row + i * kChunk, staging);
    }
  }

  // Rows `row` .. row + 63 of the weight; the tensor map clips those that do not exist.
  __device__ __forceinline__ void store(float (&acc)[Tile::kCols / 2], const WeightTile& tile,
                                        int row, Staging& staging) const {
    const ResultMatrix& to = params_.dw[tile.plane];
    // The copy engine adds fp32, once to each element; bf16 is added here, before its only
    // rounding.
    constexpr bool kAddHere = kAccumulate && std::is_same_v<Out, __nv_bfloat16>;
    if constexpr (kAddHere) add_old(acc, to, tile, row, staging.thread());
    constexpr int kRegisters = kResultCols<Out> / 2;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kCols / kResultCols<Out>; ++chunk) {
      staging.write(Out{}, [&](int i) { return acc[chunk * kRegisters + i]; });
      staging.template send<Out, kAccumulate && !kAddHere>(to, tile.col + chunk * kResultCols<Out>,
                                                           row, tile.expert, kChunk);
    }
  }

  __device__ __forceinline__ void store_zero(const WeightTile& tile, Staging& staging) const {
    for (int i = 0; i < kRowTiles; ++i) {
      const int row = tile.row + i * kChunk;
      for (int chunk = 0; chunk < Tile::kCols / kResultCols<Out>; ++chunk) {
        staging.write(Out{}, [](int) { return 0.0f; });
        staging.template send<Out>(params_.dw[tile.plane], tile.col + chunk * kResultCols<Out>, row,
                                   tile.expert, kChunk);
      }
    }
  }

  __device__ __forceinline__ void add_old(float (&acc)[Tile::kCols / 2], const ResultMatrix& to,
                                          const WeightTile& tile, int first_row, int thread) const {
    const int lane = thread % 32;
    const uint8_t* plane = to.data + tile.expert * to.plane_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + thread / 32 * 16 + lane / 4 + half * 8;
      if (row >= params_.rows) continue;
#pragma unroll
      for (int j = 0; j < Tile::kCols / 8; ++j) {
        const int col = tile.col + j * 8 + lane % 4 * 2;
        if (col >= to.cols) continue;
        const float2 old = __bfloat1622float2(
            *reinterpret_cast<const __nv_bfloat162*>(plane + row * to.row_bytes + col * 2));
        acc[4 * j + 2 * half] += old.x;
        acc[4 * j + 2 * half + 1] += old.y;
      }
    }
  }

  const Params& params_;
  const int rank_;
  uint8_t* const staging_;
  const Ring ring_;
};

template <class Tile, class Out, bool kAccumulate, Gathered kGathered = Gathered::kNone>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_wgrad_sm90_kernel(const __grid_constant__ GroupedWgradParams params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  GroupedWgradSm90<Tile, Out, kAccumulate, kGathered>(params, smem).run();
}

}  // namespace dropless::cuda
