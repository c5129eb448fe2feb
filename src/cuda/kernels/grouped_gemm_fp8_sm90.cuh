// out[r] = lhs[r] * rhs[e(r)] in e4m3 for ragged groups of rows, for sm_90a: lhs scaled in blocks
// of one row and 128 contraction elements, rhs in blocks of 128 x 128, both K-major.
//
// As grouped_gemm_sm90.cuh: persistent blocks, tiles that start at each group's first row.
// Different are the scales, which a second loading warp copies into the stages beside the operands;
// the sums, which are added to fp32 accumulators after every stage; and the epilogue. Products of
// FP8 are so short that an epilogue in the multiplying warpgroups would cost as much: they only
// write their accumulators to shared memory (Epilogue::hand_over), and other warps do the rest
// (Epilogue::Store) while the next tile is multiplied. Where that rest is longer than the products,
// the multiplying warpgroups do it after all (Epilogue::Finish).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/tile/handoff.cuh"
#include "cuda/tile/operand_fp8.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

template <class EpilogueParams>
struct alignas(128) GroupedGemmFp8Params {
  CUtensorMap lhs;     // planes of [M, Kc]
  CUtensorMap rhs[2];  // [E, N, Kc]: one a plane of lhs, or gate and up of expert_up
  EpilogueParams epilogue;
  const float* lhs_scale;     // [M, planes, blocks]
  const float* rhs_scale[2];  // [E, ceil(N/128), blocks]
  const int32_t* offsets;     // [E+1]
  int experts;
  int rows;    // M
  int cols;    // N; of one matrix if gate and up stand side by side
  int blocks;  // contraction blocks of 128 in one plane
  int planes;  // 1, or 2: the contraction runs over both planes of lhs, each with its own rhs
};

// Threads of a block: two warpgroups multiply, one loads, and kStorers (handoff.cuh) store.
template <int kStorers>
inline constexpr int kFp8Threads = (kStorers == 1 ? 4 : 3) * kWarpgroup;

// Registers a thread of each role. A block starts with as many as its threads share evenly, in
// units of 8, and hands them round: 3 * 168 = 2 * 224 + 56 = 2 * 232 + 40,
// 4 * 128 = 2 * 208 + 40 + 56.
template <int kStorers>
struct Fp8Registers {
  static constexpr int kMultiplying = kStorers == 1 ? 208 : kStorers == 0 ? 224 : 232;
  static constexpr int kLoading = kStorers == 0 ? 56 : 40;
  static constexpr int kStoring = 56;
};

template <class Tile, class Epilogue>
class GroupedGemmFp8Sm90 {
 public:
  using Params = GroupedGemmFp8Params<typename Epilogue::Params>;
  using Ring = Fp8Stages<Tile>;
  using Half = Handoff<Epilogue::template kBoxes<Tile>>;
  static constexpr bool kHandsOver = Epilogue::kStorers != kNoStorers;
  using Registers = Fp8Registers<Epilogue::kStorers>;
  static constexpr int kThreads = kFp8Threads<Epilogue::kStorers>;
  static constexpr int kTeam = kFp8Team<Epilogue::kStorers>;
  static constexpr int kTeamBytes = [] {
    if constexpr (kHandsOver) return Epilogue::Store::kBytes;
    return 0;
  }();
  // In shared memory: the ring's stages; boxes of both halves; memory of both teams; barriers of
  // both halves and teams; the ring's scales and barriers.
  static constexpr int kBoxesAt = Tile::kStages * Tile::kStageBytes;
  static constexpr int kTeamsAt = kBoxesAt + 2 * Half::kBytes;
  static constexpr int kBarriersAt = kTeamsAt + 2 * kTeamBytes;
  static constexpr int kRingAt = kBarriersAt + 2 * (Half::kBarrierBytes + 16);
  static constexpr int kSharedBytes = kRingAt + Ring::kScaleBytes + Ring::kBarrierBytes;
  static_assert(kSharedBytes <= 227 * 1024);
  // Columns of one matrix that a tile covers: half of it if gate and up stand side by side.
  static constexpr int kTileCols = Tile::kCols / Epilogue::kMatrices;
  using Scheduler = RowTileScheduler<
      GemmTile<Tile::kRows, kTileCols, Tile::kStages, Tile::kCluster, Tile::kPingpong>>;
  // Rows of a box of rhs: half the tile's where 64 would not divide what each block of a cluster
  // loads.
  static constexpr int kRhsBox =
      kTileCols % (Tile::kCluster * kChunk) == 0 ? kChunk : kTileCols / 2;
  static_assert(kTileCols % (Tile::kCluster * kRhsBox) == 0);

  __device__ GroupedGemmFp8Sm90(const Params& params, uint8_t* smem)
      : params_(params),
        rank_(Tile::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank())),
        smem_(smem),
        ring_(smem, smem + kRingAt) {}

  __device__ void run() {
    // The same for all lanes, which the compiler does not know of threadIdx.x: branches on it would
    // count as divergent, and addresses would be made in every lane.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        half(i).init(kTeam / 32);
        ptx::mbarrier_init(team_barrier(i), 1);
      }
      ring_.init();
      ptx::fence_mbarrier_init();
    }
    if (Tile::kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    if (warpgroup < 2) {
      ptx::register_increase<Registers::kMultiplying>();
      multiply(warpgroup);
    } else if (warpgroup == 2) {
      ptx::register_decrease<Registers::kLoading>();
      const int warp = threadIdx.x % kWarpgroup / 32;
      if (warp == 0) {
        produce_operands();
      } else if (warp == 1) {
        produce_scales();
      } else {
        if constexpr (Epilogue::kStorers == 0) {
          store(static_cast<int>(threadIdx.x) % kWarpgroup - 64);
        }
        zero_outside(warp - 2);
      }
    } else if constexpr (Epilogue::kStorers == 1) {
      ptx::register_decrease<Registers::kStoring>();
      store(static_cast<int>(threadIdx.x) - 3 * kWarpgroup);
    }
    // A peer may still send to this block or arrive at its barriers.
    if (Tile::kCluster > 1) ptx::cluster_sync();
  }

 private:
  __device__ __forceinline__ Half half(int i) const {
    return Half(smem_ + kBoxesAt + i * Half::kBytes, smem_ + kBarriersAt + i * Half::kBarrierBytes);
  }
  __device__ __forceinline__ uint64_t* team_barrier(int i) const {
    return reinterpret_cast<uint64_t*>(smem_ + kBarriersAt + 2 * Half::kBarrierBytes + i * 16);
  }
  __device__ int first_item() const { return blockIdx.x / Tile::kCluster; }
  __device__ int item_step() const { return gridDim.x / Tile::kCluster; }
  __device__ Scheduler scheduler() const {
    return Scheduler(params_.offsets, params_.experts, params_.rows, params_.cols, rank_);
  }

  __device__ void produce_operands() {
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
            ring_.acquire(state);
            load(state.stage, tile, plane, block * kFp8Block);
            state.advance();
          }
        }
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void load(int stage, const RowTile& tile, int plane, int k) {
    constexpr int kCluster = Tile::kCluster;
    uint64_t* full = ring_.full + stage;
    load_chunks<Major::kK, Tile::kRows / kChunk, kCluster>(
        ring_.lhs(stage), &params_.lhs, full, tile.row, k, plane, tile.shares_rows, rank_);
#pragma unroll
    for (int matrix = 0; matrix < Epilogue::kMatrices; ++matrix) {
      load_rhs(ring_.rhs(stage) + matrix * kTileCols * kFp8Block,
               &params_.rhs[Epilogue::kMatrices == 1 ? plane : matrix], full, tile, k);
    }
  }

  // In a cluster, unless its blocks have different columns, this block loads its share for both.
  __device__ __forceinline__ void load_rhs(uint8_t* smem, const CUtensorMap* map, uint64_t* full,
                                           const RowTile& tile, int k) {
    constexpr int kBoxes = kTileCols / kRhsBox, kShare = kBoxes / Tile::kCluster;
    const bool shared = Tile::kCluster > 1 && !tile.shares_rows;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int box = shared ? i + rank_ * kShare : i;
      if (shared && i >= kShare) break;
      uint8_t* to = smem + box * kRhsBox * kFp8Block;
      if (shared) {
        ptx::tma_load_multicast(to, map, full, k, tile.col + box * kRhsBox, tile.expert, 3);
      } else {
        ptx::tma_load(to, map, full, k, tile.col + box * kRhsBox, tile.expert);
      }
    }
  }

  // A warp: each lane copies the scales of some rows, the first ones those of the columns too.
  __device__ void produce_scales() {
    constexpr int kLaneRows = Tile::kRows / 32;
    const int lane = threadIdx.x % 32;
    const int row_scales = params_.planes * params_.blocks;
    const int col_blocks = (params_.cols + kFp8Block - 1) / kFp8Block;
    Scheduler tiles = scheduler();
    typename Ring::State state;
    RowTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      const float* lhs = params_.lhs_scale + static_cast<int64_t>(tile.row + lane) * row_scales;
      // Columns 64 * lane of the tile, which is one of gate or of up if both stand side by side.
      const int matrix = lane * kChunk / kTileCols;
      const int col = tile.col + lane * kChunk - matrix * kTileCols;
      const bool has_col = lane < Ring::kRhsScales && col < params_.cols;
      const int64_t rhs_offset =
          (static_cast<int64_t>(tile.expert) * col_blocks + col / kFp8Block) * params_.blocks;
      for (int plane = 0; plane < params_.planes; ++plane) {
        const float* rhs =
            has_col ? params_.rhs_scale[Epilogue::kMatrices == 1 ? plane : matrix] + rhs_offset
                    : params_.rhs_scale[0];
        for (int block = 0; block < params_.blocks; ++block) {
          ptx::mbarrier_wait(ring_.empty + state.stage, state.phase ^ 1);
          const uint32_t to = ptx::shared_address(ring_.scale(state.stage)) + lane * 4;
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) {
            const bool present = tile.row + lane + 32 * i < params_.rows;
            ptx::copy_async_4(to + 128 * i, present ? lhs + 32 * i * row_scales : lhs_none(),
                              present);
          }
          if (lane < Ring::kRhsScales) {
            ptx::copy_async_4(to + Tile::kRows * 4, has_col ? rhs + block : rhs, has_col);
          }
          ptx::copy_async_arrive(ring_.full + state.stage);
          ++lhs;
          state.advance();
        }
      }
    }
  }
  __device__ __forceinline__ const float* lhs_none() const { return params_.lhs_scale; }

  // One half of each tile's rows.
  __device__ void multiply(int half_index) {
    const int thread = threadIdx.x % kWarpgroup;
    const int blocks = params_.blocks * params_.planes;
    auto epilogue = make_epilogue(half_index);
    Scheduler tiles = scheduler();
    typename Ring::State state;
    RowTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      const int first = half_index * kChunk;
      const int row = tile.row + first, rows = min(tile.rows - first, kChunk);
      float acc[Tile::kCols / 2];
      if (rows <= 0) {
        ring_.drain(state, blocks, half_index, thread);
        if constexpr (finishes_together()) epilogue.without_rows(tile, row);
        continue;
      }
      if constexpr (kHandsOver) {
        ring_.multiply(acc, state, blocks, half_index, thread);
        Epilogue::hand_over(params_.epilogue, acc, tile, row, rows, epilogue, thread);
      } else {
        epilogue.prefetch(tile, row, rows);
        ring_.multiply(acc, state, blocks, half_index, thread);
        epilogue(acc, tile, row, rows);
      }
    }
    if constexpr (!kHandsOver) epilogue.finish();
  }
  // Whether the epilogue needs both halves of a tile, even one without rows.
  static constexpr bool finishes_together() {
    if constexpr (kHandsOver)
      return false;
    else
      return Epilogue::kTogether;
  }
  __device__ __forceinline__ auto make_epilogue(int half_index) const {
    if constexpr (kHandsOver) {
      return half(half_index);
    } else {
      return typename Epilogue::Finish(params_.epilogue, half(half_index).box(0),
                                       team_barrier(half_index), half_index);
    }
  }

  // As many teams as halves.
  __device__ void store(int storing_thread) {
    const int index = storing_thread / kTeam;
    const StoringTeam<kTeam> team = {storing_thread % kTeam, kWarpgroupBarrier + 2 + index};
    Half results = half(index);
    typename Epilogue::Store store(params_.epilogue, team, smem_ + kTeamsAt + index * kTeamBytes,
                                   team_barrier(index));
    Scheduler tiles = scheduler();
    RowTile tile;
    for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
      const int first = index * kChunk;
      if (tile.rows <= first) continue;
      store(tile, tile.row + first, min(tile.rows - first, kChunk), results);
    }
    // The block's shared memory must outlive the stores that read it.
    if (team.thread == 0) ptx::tma_store_wait_read<0>();
  }

  // Rows of no group become 0: two warps of every block share them.
  __device__ void zero_outside(int warp) {
    const int begin = min(max(params_.offsets[0], 0), params_.rows);
    const int end = min(max(params_.offsets[params_.experts], 0), params_.rows);
    const int outside = begin + max(0, params_.rows - end);
    for (int i = blockIdx.x * 2 + warp; i < outside; i += gridDim.x * 2) {
      Epilogue::zero_row(params_.epilogue, i < begin ? i : end + (i - begin), threadIdx.x % 32);
    }
  }

  const Params& params_;
  const int rank_;
  uint8_t* const smem_;
  Ring ring_;
};

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(kFp8Threads<Epilogue::kStorers>, 1) grouped_gemm_fp8_sm90_kernel(
    const __grid_constant__ GroupedGemmFp8Params<typename Epilogue::Params> params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  GroupedGemmFp8Sm90<Tile, Epilogue>(params, smem).run();
}

}  // namespace dropless::cuda
