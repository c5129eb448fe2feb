// out[r] = lhs[r] * rhs[e(r)] in e4m3 for ragged groups of rows, for sm_90a: lhs scaled in blocks
// of one row and 128 contraction elements, rhs in blocks of 128 x 128, both K-major.
//
// As grouped_gemm_sm90.cuh: persistent blocks of three warpgroups, tiles that start at each group's
// first row, any epilogue. Different are the scales, which a second loading warp copies into the
// stages beside the operands, and the sums, which are added to fp32 accumulators after every stage.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/tile/operand_fp8.cuh"
#include "cuda/tile/result.cuh"
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

// Registers a thread of each role: 128 * (2 * 232 + 40) fit the 65536 of a multiprocessor.
inline constexpr int kFp8ConsumerRegisters = 232;
inline constexpr int kFp8ProducerRegisters = 40;
inline constexpr int kFp8GemmThreads = 3 * kWarpgroup;

template <class Tile, class Epilogue>
class GroupedGemmFp8Sm90 {
 public:
  using Params = GroupedGemmFp8Params<typename Epilogue::Params>;
  using Ring = Fp8Stages<Tile>;
  using Staging = typename Epilogue::template Staging<Tile>;  // of a warpgroup
  static constexpr int kRingBytes = Tile::kStages * Tile::kStageBytes;
  // A barrier of each warpgroup's staging follows the ring's.
  static constexpr int kSharedBytes =
      kRingBytes + 2 * Staging::kBytes + Ring::kScaleBytes + Ring::kBarrierBytes + 2 * 8;
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
  // Epilogues with inputs of their own start loading them before the products.
  static constexpr bool kPrefetches = requires { Epilogue::kPrefetches; };

  __device__ GroupedGemmFp8Sm90(const Params& params, uint8_t* smem)
      : params_(params),
        rank_(Tile::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank())),
        staging_(smem + kRingBytes),
        staging_barriers_(reinterpret_cast<uint64_t*>(staging_ + 2 * Staging::kBytes +
                                                      Ring::kScaleBytes + Ring::kBarrierBytes)),
        ring_(smem, staging_ + 2 * Staging::kBytes) {}

  __device__ void run() {
    const int warpgroup = threadIdx.x / kWarpgroup;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(staging_barriers_, 1);
      ptx::mbarrier_init(staging_barriers_ + 1, 1);
      ring_.init();
    }
    if (Tile::kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    if (warpgroup == 2) {
      ptx::register_decrease<kFp8ProducerRegisters>();
      const int warp = threadIdx.x % kWarpgroup / 32;
      if (warp == 0) {
        produce_operands();
      } else if (warp == 1) {
        produce_scales();
      } else {
        zero_outside(warp - 2);
      }
    } else {
      ptx::register_increase<kFp8ConsumerRegisters>();
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

  __device__ void consume(int warpgroup) {
    const int thread = threadIdx.x % kWarpgroup;
    const int blocks = params_.blocks * params_.planes;
    Staging staging = make_staging(warpgroup);
    Epilogue epilogue(params_.epilogue);
    Scheduler tiles = scheduler();
    typename Ring::State state;
    RowTile tile;
    if constexpr (Tile::kPingpong) {
      if (warpgroup == 1) state.advance(blocks);
      int item = first_item() + warpgroup * item_step();
      for (int n = 0; tiles.find(item, tile); item += 2 * item_step(), ++n) {
        if constexpr (kPrefetches) {
          if (tile.rows > 0) epilogue.prefetch(tile, tile.row, tile.rows, staging);
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
    } else {
      for (int item = first_item(); tiles.find(item, tile); item += item_step()) {
        half_tile(tile, warpgroup, blocks, state, staging, epilogue);
      }
    }
    staging.finish();
  }

  __device__ __forceinline__ Staging make_staging(int warpgroup) const {
    uint8_t* buffers = staging_ + warpgroup * Staging::kBytes;
    if constexpr (kPrefetches)
      return Staging(buffers, warpgroup, staging_barriers_ + warpgroup);
    else
      return Staging(buffers, warpgroup);
  }

  // Both warpgroups work on the tile, 64 rows each.
  __device__ __forceinline__ void half_tile(const RowTile& tile, int warpgroup, int blocks,
                                            typename Ring::State& state, Staging& staging,
                                            Epilogue& epilogue) {
    static_assert(Tile::kPingpong || Tile::kRows == 2 * kChunk);
    const int first = warpgroup * kChunk, rows = min(tile.rows - first, kChunk);
    if (rows <= 0) {
      ring_.drain(state, blocks, warpgroup, threadIdx.x % kWarpgroup);
      return;
    }
    if constexpr (kPrefetches) epilogue.prefetch(tile, tile.row + first, rows, staging);
    float acc[1][Tile::kCols / 2];
    ring_.multiply(acc, state, blocks, warpgroup, threadIdx.x % kWarpgroup, [](int) {});
    epilogue.store(acc, tile, tile.row + first, rows, staging);
  }

  // This warpgroup works on the whole tile, while the other one stores its own.
  __device__ __forceinline__ void whole_tile(const RowTile& tile, int warpgroup, int blocks,
                                             typename Ring::State& state, Staging& staging,
                                             Epilogue& epilogue) {
    constexpr int kRowTiles = Tile::kRows / kChunk;
    const int thread = threadIdx.x % kWarpgroup;
    float acc[kRowTiles][Tile::kCols / 2];
    ring_.multiply(acc, state, blocks, 0, thread, [&](int block) {
      if (block == blocks - 1) ring_.pass_turn(warpgroup, thread);
    });
    epilogue.store(acc, tile, tile.row, tile.rows, staging);
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
  uint8_t* const staging_;
  uint64_t* const staging_barriers_;
  Ring ring_;
};

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(kFp8GemmThreads, 1) grouped_gemm_fp8_sm90_kernel(
    const __grid_constant__ GroupedGemmFp8Params<typename Epilogue::Params> params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  GroupedGemmFp8Sm90<Tile, Epilogue>(params, smem).run();
}

}  // namespace dropless::cuda
