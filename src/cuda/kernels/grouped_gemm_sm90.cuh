// out[r] = lhs[r] * rhs[e(r)] in bf16 for ragged groups of rows, for sm_90a.
//
// Persistent blocks of three warpgroups: one loads operands by TMA into a ring of stages, two
// multiply them with wgmma. Tiles start at each group's first row, so a group's last tile may reach
// into the next group's rows: these are computed and not stored. Work that is not there (64 rows
// past the group's end) is skipped. What happens to the accumulators is the epilogue's business
// (epilogue_*.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tile/gathered_rows.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/result.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

template <class EpilogueParams>
struct alignas(128) GroupedGemmParams {
  CUtensorMap lhs;     // planes of [M, Kc]
  RowSource source;    // in its place if rows are gathered: one plane
  CUtensorMap rhs[2];  // [E, Kc, N] or [E, N, Kc]: one a plane of lhs, or gate and up of expert_up
  EpilogueParams epilogue;
  const int32_t* offsets;  // [E+1]
  int experts;
  int rows;    // M
  int cols;    // N; of one matrix if gate and up stand side by side
  int blocks;  // contraction blocks of 64 in one plane
  int planes;  // 1, or 2: the contraction runs over both planes of lhs, each with its own rhs
};

// Registers a thread of each role: 128 * (2 * 232 + 40) fit the 65536 of a multiprocessor.
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kGemmThreads = 3 * kWarpgroup;

template <class Tile, Major kRhsMajor, class Epilogue, Gathered kGathered = Gathered::kNone>
class GroupedGemmSm90 {
 public:
  using Params = GroupedGemmParams<typename Epilogue::Params>;
  using Ring = Stages<Tile, Major::kK, kRhsMajor, kGathered>;
  static_assert(kGathered != Gathered::kRhs);
  using Staging = typename Epilogue::template Staging<Tile>;  // of a warpgroup
  static constexpr int kSharedBytes = Tile::kStages * Tile::kStageBytes + 2 * Staging::kBytes +
                                      Ring::kBarriers * static_cast<int>(sizeof(uint64_t));
  // Columns of one matrix that a tile covers: half of it if gate and up stand side by side.
  static constexpr int kTileCols = Tile::kCols / Epilogue::kMatrices;
  // Rows of a box of a K-major rhs; MN-major ones have 64 columns. A cluster's blocks load an equal
  // number of boxes each.
  static constexpr int kRhsRows =
      Tile::kCluster == 2 && kTileCols % (2 * kChunk) != 0 ? kTileCols / 2 : kChunk;
  using Scheduler = RowTileScheduler<
      GemmTile<Tile::kRows, kTileCols, Tile::kStages, Tile::kCluster, Tile::kPingpong>>;

  __device__ GroupedGemmSm90(const Params& params, uint8_t* smem)
      : params_(params),
        rank_(Tile::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank())),
        staging_(smem + Tile::kStages * Tile::kStageBytes),
        ring_(smem, staging_ + 2 * Staging::kBytes) {}

  __device__ void run() {
    // The same for all lanes, which the compiler does not know of threadIdx.x: branches on it would
    // count as divergent, and addresses would be made in every lane.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (threadIdx.x == 0) {
      Staging::init(staging_);
      Staging::init(staging_ + Staging::kBytes);
      ring_.init();
    }
    if (Tile::kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    if (warpgroup == 2) {
      ptx::register_decrease<kProducerRegisters>();
      const int warp = threadIdx.x % kWarpgroup / 32;
      if constexpr (kGathered == Gathered::kLhs) {
        produce_gathered();
        zero_outside(warp, 4);
      } else if (warp == 0) {
        produce();
      } else {
        zero_outside(warp - 1, 3);
      }
    } else {
      ptx::register_increase<kConsumerRegisters>();
      consume(warpgroup);
    }
    // A peer may still send to this block or arrive at its barriers.
    if (Tile::kCluster > 1) ptx::cluster_sync();
  }

 private:
  __device__ int first_item() const { return blockIdx.x / Tile::kCluster; }
  __device__ int item_step() const { return gridDim.x / Tile::kCluster; }
  __device__ Scheduler scheduler() const {
    return Scheduler(params_.offsets, params_.experts, params_.rows, params_.cols, rank_);
  }

  __device__ void produce() {
    if (threadIdx.x % 32 == 0) {
      ptx::prefetch_tensor_map(&params_.lhs);
      ptx::prefetch_tensor_map(&params_.rhs[0]);
      ptx::prefetch_tensor_map(&params_.rhs[1]);
    }
    Scheduler tiles = scheduler();
    typename Ring::State state;
    RowTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      if (threadIdx.x % 32 == 0) {
        for (int plane = 0; plane < params_.planes; ++plane) {
          for (int block = 0; block < params_.blocks; ++block) {
            ring_.await_free(state);
            ring_.announce(state.stage);
            load_chunks<Major::kK, Tile::kRows / kChunk, Tile::kCluster>(
                ring_.lhs(state.stage), &params_.lhs, ring_.full + state.stage, tile.row,
                block * kChunk, plane, tile.shares_rows, rank_);
            load_rhs(state.stage, tile, plane, block * kChunk);
            state.advance();
          }
        }
      }
      __syncwarp();
    }
  }

  // All four warps copy rows; one thread sees to the other operand.
  __device__ void produce_gathered() {
    const int thread = threadIdx.x % kWarpgroup;
    Scheduler tiles = scheduler();
    GatheredRows<Tile::kRows> rows(params_.source, thread);
    typename Ring::State state;
    RowTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      rows.read_slots(tile.row, tile.rows);
      rows.find_rows();
      for (int block = 0; block < params_.blocks; ++block) {
        ring_.await_free(state);
        if (thread == 0) {
          ring_.announce(state.stage);
          load_rhs(state.stage, tile, 0, block * kChunk);
        }
        rows.copy(ring_.lhs(state.stage), block * kChunkUnits, params_.source.units);
        ring_.arrive_when_copied(state.stage);
        state.advance();
      }
    }
  }

  __device__ __forceinline__ void load_rhs(int stage, const RowTile& tile, int plane, int k) {
#pragma unroll
    for (int matrix = 0; matrix < Epilogue::kMatrices; ++matrix) {
      load_chunks<kRhsMajor, kTileCols / kRhsRows, Tile::kCluster, kRhsRows>(
          ring_.rhs(stage) + matrix * kTileCols * kChunk * 2,
          &params_.rhs[Epilogue::kMatrices == 1 ? plane : matrix], ring_.full + stage, tile.col, k,
          tile.expert, !tile.shares_rows, rank_);
    }
  }

  __device__ void consume(int warpgroup) {
    const int thread = threadIdx.x % kWarpgroup;
    const int blocks = params_.blocks * params_.planes;
    Staging staging(staging_ + warpgroup * Staging::kBytes, warpgroup);
    Epilogue epilogue(params_.epilogue);
    Scheduler tiles = scheduler();
    typename Ring::State state;
    RowTile tile;
    if constexpr (Tile::kPingpong) {
      if (warpgroup == 1) state.advance(blocks);
      int item = first_item() + warpgroup * item_step();
      for (int n = 0; tiles.find(item, tile); item += 2 * item_step(), ++n) {
        if (tile.rows > 0) {
          epilogue.template prepare<Tile::kRows, Tile::kCols>(tile, tile.row, tile.rows, staging);
        }
        ring_.await_turn(warpgroup, n);
        if (tile.rows == 0) {
          ring_.drain(state, blocks, warpgroup, thread);
          ring_.pass_turn(warpgroup, thread);
        } else {
          whole_tile(tile, warpgroup, blocks, state, staging, epilogue);
        }
        state.advance(blocks);
      }
    } else if constexpr (Epilogue::template kStepped<Tile>) {
      typename Epilogue::template Pending<Tile> pending;
      const StepOf<decltype(pending)> step = {epilogue, pending, staging};
      for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
        half_tile_in_steps(tile, warpgroup, blocks, state, epilogue, pending, step);
      }
      if (Epilogue::kDeferred) for_each_index<Epilogue::template kSteps<Tile>>(step);
    } else {
      for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
        half_tile(tile, warpgroup, blocks, state, staging, epilogue);
      }
    }
    staging.finish();
  }

  // Both warpgroups work on the tile, 64 rows each.
  __device__ __forceinline__ void half_tile(const RowTile& tile, int warpgroup, int blocks,
                                            typename Ring::State& state, Staging& staging,
                                            Epilogue& epilogue) {
    static_assert(Tile::kPingpong || Tile::kRows == 2 * kChunk);
    const int rows = tile.rows - warpgroup * kChunk;
    if (rows <= 0) {
      ring_.drain(state, blocks, warpgroup, threadIdx.x % kWarpgroup);
      return;
    }
    epilogue.template prepare<kChunk, Tile::kCols>(tile, tile.row + warpgroup * kChunk,
                                                   min(rows, kChunk), staging);
    float acc[1][Tile::kCols / 2];
    ring_.multiply(
        acc, state, blocks, warpgroup, threadIdx.x % kWarpgroup, EveryStep(), [](int, int) {},
        [](int) {});
    epilogue.store(acc, tile, tile.row + warpgroup * kChunk, min(rows, kChunk), staging);
  }

  template <class Pending>
  struct StepOf {
    const Epilogue& epilogue;
    const Pending& pending;
    Staging& staging;
    template <class Index>
    __device__ __forceinline__ void operator()(Index index) const {
      epilogue.step(index, pending, staging);
    }
  };

  // As half_tile, with an epilogue in steps. Deferred, what is stored is the last tile's results,
  // beside this one's first products.
  template <class Pending>
  __device__ __forceinline__ void half_tile_in_steps(const RowTile& tile, int warpgroup, int blocks,
                                                     typename Ring::State& state,
                                                     const Epilogue& epilogue, Pending& pending,
                                                     const StepOf<Pending>& step) {
    constexpr int kSteps = Epilogue::template kSteps<Tile>;
    const int rows = tile.rows - warpgroup * kChunk, thread = threadIdx.x % kWarpgroup;
    if (rows <= 0) {
      ring_.drain(state, blocks, warpgroup, thread);
      return;
    }
    float acc[1][Tile::kCols / 2];
    ring_.template multiply<Epilogue::kDeferred ? kSteps : 0>(
        acc, state, blocks, warpgroup, thread, EveryStep(), [](int, int) {}, [](int) {}, step);
    epilogue.collect(acc[0], tile, tile.row + warpgroup * kChunk, min(rows, kChunk), pending,
                     thread);
    if (!Epilogue::kDeferred) for_each_index<kSteps>(step);
  }

  // This warpgroup works on the whole tile, while the other one stores its own.
  __device__ __forceinline__ void whole_tile(const RowTile& tile, int warpgroup, int blocks,
                                             typename Ring::State& state, Staging& staging,
                                             Epilogue& epilogue) {
    constexpr int kRowTiles = Tile::kRows / kChunk;
    float acc[kRowTiles][Tile::kCols / 2];
    ring_.multiply(
        acc, state, blocks, 0, threadIdx.x % kWarpgroup, EveryStep(), [](int, int) {},
        [&](int block) {
          if (block == blocks - 1) ring_.pass_turn(warpgroup, threadIdx.x % kWarpgroup);
        });
    epilogue.store(acc, tile, tile.row, tile.rows, staging);
  }

  // Rows of no group become 0: `warps` warps of every block share them.
  __device__ void zero_outside(int warp, int warps) {
    const int begin = min(max(params_.offsets[0], 0), params_.rows);
    const int end = min(max(params_.offsets[params_.experts], 0), params_.rows);
    const int outside = begin + max(0, params_.rows - end);
    for (int i = blockIdx.x * warps + warp; i < outside; i += gridDim.x * warps) {
      Epilogue::zero_row(params_.epilogue, i < begin ? i : end + (i - begin), threadIdx.x % 32);
    }
  }

  const Params& params_;
  const int rank_;
  uint8_t* const staging_;
  Ring ring_;
};

template <class Tile, Major kRhsMajor, class Epilogue, Gathered kGathered = Gathered::kNone>
__global__ void __launch_bounds__(kGemmThreads, 1) grouped_gemm_sm90_kernel(
    const __grid_constant__ GroupedGemmParams<typename Epilogue::Params> params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  GroupedGemmSm90<Tile, kRhsMajor, Epilogue, kGathered>(params, smem).run();
}

}  // namespace dropless::cuda
