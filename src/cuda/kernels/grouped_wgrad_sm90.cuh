// dw[p][e] (+)= sum over the rows r of expert e of outer(x[r], dy[r, p]), bf16 operands, for sm_90a.
//
// A product whose contraction runs over a group's rows. Both operands are read as they lie, rows outermost: wgmma
// takes MN-major operands of bf16, so nothing is transposed. Roles and pipeline are those of
// grouped_gemm_sm90.cuh; every expert has the same tiles, and an empty expert's tiles are stored as zeros.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/result.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

struct alignas(128) GroupedWgradParams {
  CUtensorMap x;           // [M, Kc]
  CUtensorMap dy;          // P planes of [M, N]
  ResultMatrix dw[2];      // P of them: E planes of [Kc, N]
  const int32_t* offsets;  // [E+1]
  int experts;
  int contraction;  // M
  int rows;         // Kc
  int cols;         // N
  int planes;       // P
};

template <class Tile, class Out, bool kAccumulate>
class GroupedWgradSm90 {
 public:
  using Params = GroupedWgradParams;
  using Ring = Stages<Tile, Major::kMn, Major::kMn>;
  using Scheduler = WeightTileScheduler<Tile>;
  static constexpr int kSharedBytes = Tile::kStages * Tile::kStageBytes + 2 * kStagingBytes +
                                      Ring::kBarriers * static_cast<int>(sizeof(uint64_t));

  __device__ GroupedWgradSm90(const Params& params, uint8_t* smem)
      : params_(params),
        rank_(Tile::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank())),
        staging_(smem + Tile::kStages * Tile::kStageBytes),
        ring_(smem, staging_ + 2 * kStagingBytes) {}

  __device__ void run() {
    const int warpgroup = threadIdx.x / kWarpgroup;
    if (threadIdx.x == 0) ring_.init();
    if (Tile::kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    if (warpgroup == 2) {
      ptx::register_decrease<kProducerRegisters>();
      if (threadIdx.x % kWarpgroup == 0) produce();
      __syncwarp();
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
        ring_.acquire(state);
        load_chunks<Major::kMn, Tile::kRows / kChunk, Tile::kCluster>(
            ring_.lhs(state.stage), &params_.x, ring_.full + state.stage, tile.row, tile.first + k,
            0, tile.shares_rows, rank_);
        load_chunks<Major::kMn, Tile::kCols / kChunk, Tile::kCluster>(
            ring_.rhs(state.stage), &params_.dy, ring_.full + state.stage, tile.col, tile.first + k,
            tile.plane, !tile.shares_rows, rank_);
        state.advance();
      }
    }
  }

  __device__ void consume(int warpgroup) {
    const int thread = threadIdx.x % kWarpgroup;
    ResultStaging staging(staging_ + warpgroup * kStagingBytes, warpgroup);
    const Scheduler tiles = scheduler();
    typename Ring::State state;
    WeightTile tile;
    int n = 0;
    for (int item = first_item(); tiles.find(item, tile); item += item_step(), ++n) {
      if (Tile::kPingpong) {
        if (n % 2 == warpgroup) {
          ring_.await_turn(warpgroup, n / 2);
          whole_tile(tile, warpgroup, state, staging, thread);
        } else {
          state.advance((tile.depth + kChunk - 1) / kChunk);
        }
      } else {
        half_tile(tile, warpgroup, n == 0, state, staging, thread);
      }
    }
    staging.finish();
  }

  // Both warpgroups work on the tile, 64 rows each.
  __device__ __forceinline__ void half_tile(const WeightTile& tile, int warpgroup, bool first,
                                            typename Ring::State& state, ResultStaging& staging,
                                            int thread) {
    static_assert(Tile::kPingpong || Tile::kRows == 2 * kChunk);
    const int blocks = (tile.depth + kChunk - 1) / kChunk;
    const int row = tile.row + warpgroup * kChunk;
    int signal_at = -1;
    if (first && warpgroup == 1) ptx::named_barrier_sync(kStartBarrier, 2 * kWarpgroup);
    if (first && warpgroup == 0) signal_at = min(kStagger, blocks - 1);
    const bool mine = tile.present && row < params_.rows;
    if (first && warpgroup == 0 && (!mine || blocks == 0)) {
      ptx::named_barrier_arrive(kStartBarrier, 2 * kWarpgroup);
    }
    if (!mine) {
      ring_.drain(state, blocks, thread);
    } else if (blocks == 0) {
      store_zero(tile, row, staging);
    } else {
      float acc[1][Tile::kCols / 2];
      ring_.multiply_ragged(acc, state, tile.depth, warpgroup, thread,
                            kWarpgroupBarrier + warpgroup, [=](int block) {
                              if (block == signal_at) {
                                ptx::named_barrier_arrive(kStartBarrier, 2 * kWarpgroup);
                              }
                            });
      store(acc[0], tile, row, staging);
    }
  }

  // This warpgroup works on the whole tile, while the other one stores its own.
  __device__ __forceinline__ void whole_tile(const WeightTile& tile, int warpgroup,
                                             typename Ring::State& state, ResultStaging& staging,
                                             int thread) {
    constexpr int kRowTiles = Tile::kRows / kChunk;
    const int blocks = (tile.depth + kChunk - 1) / kChunk;
    if (!tile.present || blocks == 0) {
      ring_.drain(state, blocks, thread);
      ring_.pass_turn(warpgroup, thread);
      if (!tile.present) return;
      for (int i = 0; i < kRowTiles; ++i) store_zero(tile, tile.row + i * kChunk, staging);
      return;
    }
    float acc[kRowTiles][Tile::kCols / 2];
    ring_.multiply_ragged(acc, state, tile.depth, 0, thread, kWarpgroupBarrier + warpgroup,
                          [=, this](int block) {
                            if (block == blocks - 1) ring_.pass_turn(warpgroup, thread);
                          });
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) store(acc[i], tile, tile.row + i * kChunk, staging);
  }

  __device__ __forceinline__ void store(float (&acc)[Tile::kCols / 2], const WeightTile& tile,
                                        int row, ResultStaging& staging) const {
    const ResultMatrix& to = params_.dw[tile.plane];
    // The copy engine adds fp32 exactly once to each element; bf16 is added here, before the only rounding.
    constexpr bool kAddHere = kAccumulate && std::is_same_v<Out, __nv_bfloat16>;
    if constexpr (kAddHere) add_old(acc, to, tile, row, staging.thread());
    constexpr int kRegisters = kResultCols<Out> / 2;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kCols / kResultCols<Out>; ++chunk) {
      staging.write(Out{}, [&](int i) { return acc[chunk * kRegisters + i]; });
      staging.template send<Out, kAccumulate && !kAddHere>(
          to, tile.col + chunk * kResultCols<Out>, row, tile.expert, kChunk);
    }
  }

  __device__ __forceinline__ void store_zero(const WeightTile& tile, int row,
                                             ResultStaging& staging) const {
    if (kAccumulate) return;
    for (int chunk = 0; chunk < Tile::kCols / kResultCols<Out>; ++chunk) {
      staging.write(Out{}, [](int) { return 0.0f; });
      staging.template send<Out>(params_.dw[tile.plane], tile.col + chunk * kResultCols<Out>, row,
                                 tile.expert, kChunk);
    }
  }

  __device__ __forceinline__ void add_old(float (&acc)[Tile::kCols / 2], const ResultMatrix& to,
                                          const WeightTile& tile, int row, int thread) const {
    const int lane = thread % 32;
    const uint8_t* plane = to.data + tile.expert * to.plane_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + thread / 32 * 16 + lane / 4 + half * 8;
      if (r >= params_.rows) continue;
#pragma unroll
      for (int j = 0; j < Tile::kCols / 8; ++j) {
        const int col = tile.col + j * 8 + lane % 4 * 2;
        if (col >= to.cols) continue;
        const float2 old = __bfloat1622float2(
            *reinterpret_cast<const __nv_bfloat162*>(plane + r * to.row_bytes + col * 2));
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

template <class Tile, class Out, bool kAccumulate>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_wgrad_sm90_kernel(const __grid_constant__ GroupedWgradParams params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  GroupedWgradSm90<Tile, Out, kAccumulate>(params, smem).run();
}

}  // namespace dropless::cuda
