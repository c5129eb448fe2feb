// dw[p][e] (+)= sum over the rows r of expert e of outer(x[r], dy[r, p]), FP8 operands, for sm_90a.
//
// Both operands come as quantize_columns leaves them: blocks of 128 rows of one expert, rows
// contiguous, a scale for each column and block, swizzled as wgmma reads them. A stage is one such
// block, so its operands are contiguous in device memory and plain bulk copies load them. A block's
// product is accumulated by the tensor cores on its own and then added to the fp32 sum, scaled by
// its column's and its row's scale. While one warpgroup scales, the other one multiplies.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/token_blocks.h"
#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/ptx/wgmma_e4m3.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/result.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

struct alignas(128) GroupedWgradFp8Params {
  const uint8_t* x;        // [blocks, x_columns, 128]
  const float* x_scale;    // [blocks, x_columns]
  const uint8_t* dy;       // [blocks, P, dy_columns, 128]
  const float* dy_scale;   // [blocks, P, dy_columns]
  ResultMatrix dw[2];      // P of them: E planes of [Kc, N]
  const int32_t* offsets;  // [E+1]
  int experts;
  int contraction;  // M
  int rows;         // Kc
  int cols;         // N
  int planes;       // P
  int x_columns;    // Kc, rounded up to 128
  int dy_columns;   // N, rounded up to 128
  bool plain;       // dw is not what the copy engine can address
};

template <class Tile, class Out, bool kAccumulate>
class GroupedWgradFp8Sm90 {
 public:
  using Params = GroupedWgradFp8Params;
  using Scheduler = WeightTileScheduler<Tile>;
  using State = PipelineState<Tile::kStages>;
  using Staging = ResultStaging<128, 2>;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kScalesAt = Tile::kStages * Tile::kCodeBytes;
  static constexpr int kStagingAt = kScalesAt + Tile::kStages * Tile::kScaleBytes;
  static constexpr int kBarriersAt = (kStagingAt + 1023) / 1024 * 1024 + 2 * Staging::kBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * Tile::kStages * 8;

  __device__ GroupedWgradFp8Sm90(const Params& params, uint8_t* smem)
      : params_(params),
        smem_(smem),
        full_(reinterpret_cast<uint64_t*>(smem + kBarriersAt)),
        empty_(full_ + Tile::kStages) {}

  __device__ void run() {
    // The same for all lanes, which the compiler does not know of threadIdx.x: branches on it would
    // count as divergent, and addresses would be made in every lane.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (threadIdx.x == 0) {
      for (int i = 0; i < Tile::kStages; ++i) {
        ptx::mbarrier_init(full_ + i, 1);
        ptx::mbarrier_init(empty_ + i, kConsumerWarps);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warpgroup == 2) {
      ptx::register_decrease<kProducerRegisters>();
      if (threadIdx.x % kWarpgroup == 0) produce();
      __syncwarp();
    } else {
      ptx::register_increase<kConsumerRegisters>();
      consume(warpgroup);
    }
  }

 private:
  __device__ Scheduler scheduler() const {
    return Scheduler(params_.offsets, params_.experts, params_.contraction, params_.rows,
                     params_.cols, params_.planes, 0);
  }
  __device__ static __forceinline__ int blocks_of(const WeightTile& tile) {
    return (tile.depth + Tile::kDepth - 1) / Tile::kDepth;
  }
  __device__ __forceinline__ uint8_t* codes(int stage) const {
    return smem_ + stage * Tile::kCodeBytes;
  }
  __device__ __forceinline__ float* scales(int stage) const {
    return reinterpret_cast<float*>(smem_ + kScalesAt + stage * Tile::kScaleBytes);
  }

  __device__ void produce() {
    const Scheduler tiles = scheduler();
    State state;
    WeightTile tile;
    for (int item = blockIdx.x; tiles.find(item, tile); item += gridDim.x) {
      // Nothing is copied from past the end of a block's columns.
      const int rows = min(Tile::kRows, params_.x_columns - tile.row);
      const int cols = min(Tile::kCols, params_.dy_columns - tile.col);
      const int64_t first = first_token_block(tile.first, tile.expert);
      // In columns: of 128 codes, or one scale.
      int64_t x_at = first * params_.x_columns + tile.row;
      int64_t dy_at = (first * params_.planes + tile.plane) * params_.dy_columns + tile.col;
      for (int left = blocks_of(tile); left > 0; --left) {
        uint64_t* const full = full_ + state.stage;
        ptx::mbarrier_wait(empty_ + state.stage, state.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, (rows + cols) * (Tile::kDepth + 4));
        uint8_t* const lhs = codes(state.stage);
        float* const scale = scales(state.stage);
        ptx::bulk_load(scale, params_.x_scale + x_at, rows * 4, full);
        ptx::bulk_load(scale + Tile::kRows, params_.dy_scale + dy_at, cols * 4, full);
        ptx::bulk_load(lhs, params_.x + x_at * Tile::kDepth, rows * Tile::kDepth, full);
        ptx::bulk_load(lhs + Tile::kRows * Tile::kDepth, params_.dy + dy_at * Tile::kDepth,
                       cols * Tile::kDepth, full);
        x_at += params_.x_columns;
        dy_at += params_.planes * params_.dy_columns;
        state.advance();
      }
    }
  }

  __device__ void consume(int warpgroup) {
    Staging staging(smem_ + kBarriersAt - (2 - warpgroup) * Staging::kBytes, warpgroup);
    const Scheduler tiles = scheduler();
    State state;
    WeightTile tile;
    for (int item = blockIdx.x; tiles.find(item, tile); item += gridDim.x) {
      const int blocks = blocks_of(tile);
      const int row = tile.row + warpgroup * kChunk;
      if (row >= params_.rows || blocks == 0) {
        drain(state, blocks);
        if (!kAccumulate) store_zero(tile, row, staging);
      } else {
        multiply_and_store(tile, row, blocks, warpgroup, state, staging);
      }
    }
    staging.finish();
  }

  // A warp has read all it wants of a stage.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty_ + stage);
  }

  __device__ __forceinline__ void drain(State& state, int blocks) const {
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full_ + state.stage, state.phase);
      release(state.stage);
      state.advance();
    }
  }

  __device__ __forceinline__ void multiply_and_store(const WeightTile& tile, int row, int blocks,
                                                     int warpgroup, State& state,
                                                     Staging& staging) const {
    float acc[Tile::kRowTiles][Tile::kCols / 2];
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kCols / 2; ++j) acc[i][j] = 0.0f;
    }
    // Nothing but additions stands between a full stage and its first product.
    const uint64_t first = descriptor(codes(0) + warpgroup * kChunk * Tile::kDepth);
    const uint32_t lhs_base = ptx::kept(static_cast<uint32_t>(first));
    const uint32_t rhs_base =
        ptx::kept(static_cast<uint32_t>(descriptor(codes(0) + Tile::kRows * Tile::kDepth)));
    const uint64_t layout = first >> 32 << 32;  // the same for both
    const uint32_t full_at = ptx::kept(ptx::shared_address(full_));
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full_at + state.stage * 8, state.phase);
      const uint32_t offset = state.stage * (Tile::kCodeBytes / 16);
      const float* const scale = scales(state.stage);
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
        if (i > 0 && row + i * kRowStep >= params_.rows) break;
        const float* const row_scale = scale + warpgroup * kChunk + i * kRowStep +
                                       threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < Tile::kProducts; ++n) {
          float product[Tile::kProductCols / 2];
          const float low = row_scale[0], high = row_scale[8];
          multiply(product, layout, lhs_base + offset + i * (kRowStep * Tile::kDepth / 16),
                   rhs_base + offset + n * (Tile::kProductCols * Tile::kDepth / 16));
          ptx::wgmma_wait_group<0>();
          add_scaled(acc[i], n, product, low, high,
                     scale + Tile::kRows + n * Tile::kProductCols + threadIdx.x % 4 * 2);
        }
      }
      release(state.stage);
      state.advance();
    }
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      if (row + i * kRowStep < params_.rows) store(acc[i], tile, row + i * kRowStep, staging);
    }
  }

  // One block of 128 of the contraction, issued.
  __device__ static __forceinline__ void multiply(float (&product)[Tile::kProductCols / 2],
                                                  uint64_t layout, uint32_t lhs, uint32_t rhs) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 32 codes, two of a descriptor's 16-byte units
      ptx::wgmma_e4m3(product, layout | (lhs + step * 2), layout | (rhs + step * 2), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  // acc += product * its row's scale * its column's scale. low, high: of this thread's two rows;
  // `column_scale`: from the first of its columns on.
  __device__ static __forceinline__ void add_scaled(float (&acc)[Tile::kCols / 2], int n,
                                                    float (&product)[Tile::kProductCols / 2],
                                                    float low, float high,
                                                    const float* column_scale) {
    ptx::wgmma_pin(product);
    const int first = n * (Tile::kProductCols / 2);
#pragma unroll
    for (int j = 0; j < Tile::kProductCols / 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(column_scale + j * 8);
      float* const to = acc + first + 4 * j;
      to[0] = fmaf(product[4 * j], low * by.x, to[0]);
      to[1] = fmaf(product[4 * j + 1], low * by.y, to[1]);
      to[2] = fmaf(product[4 * j + 2], high * by.x, to[2]);
      to[3] = fmaf(product[4 * j + 3], high * by.y, to[3]);
    }
  }

  __device__ static __forceinline__ uint64_t descriptor(const uint8_t* codes) {
    return ptx::matrix_descriptor(ptx::shared_address(codes), 16, 1024);
  }

  // Rows `row` .. row + 63 of the weight; the tensor map clips those that do not exist.
  __device__ __forceinline__ void store(float (&acc)[Tile::kCols / 2], const WeightTile& tile,
                                        int row, Staging& staging) const {
    const ResultMatrix& to = params_.dw[tile.plane];
    if (params_.plain) {
      store_plain(acc, to, tile, row);
      return;
    }
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

  __device__ __forceinline__ void store_zero(const WeightTile& tile, int first_row,
                                             Staging& staging) const {
    for (int row = first_row; row < min(params_.rows, tile.row + Tile::kRows); row += kRowStep) {
      if (params_.plain) {
        float zero[Tile::kCols / 2] = {};
        store_plain(zero, params_.dw[tile.plane], tile, row);
        continue;
      }
      for (int chunk = 0; chunk < Tile::kCols / kResultCols<Out>; ++chunk) {
        staging.write(Out{}, [](int) { return 0.0f; });
        staging.template send<Out>(params_.dw[tile.plane], tile.col + chunk * kResultCols<Out>, row,
                                   tile.expert, kChunk);
      }
    }
  }

  // Element by element, for weights that the copy engine cannot address.
  __device__ __forceinline__ void store_plain(const float (&acc)[Tile::kCols / 2],
                                              const ResultMatrix& to, const WeightTile& tile,
                                              int first_row) const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    uint8_t* const plane = to.data + tile.expert * to.plane_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + thread / 32 * 16 + lane / 4 + half * 8;
      if (row >= params_.rows) continue;
      Out* const out = reinterpret_cast<Out*>(plane + row * to.row_bytes);
#pragma unroll
      for (int j = 0; j < Tile::kCols / 4; ++j) {
        const int col = tile.col + j / 2 * 8 + lane % 4 * 2 + j % 2;
        if (col >= to.cols) continue;
        const float old = kAccumulate ? static_cast<float>(out[col]) : 0.0f;
        out[col] = static_cast<Out>(acc[j / 2 * 4 + 2 * half + j % 2] + old);
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

  // From one block of 64 rows of a warpgroup to its next.
  static constexpr int kRowStep = 2 * kChunk;

  const Params& params_;
  uint8_t* const smem_;
  uint64_t* const full_;
  uint64_t* const empty_;
};

template <class Tile, class Out, bool kAccumulate>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_wgrad_fp8_sm90_kernel(const __grid_constant__ GroupedWgradFp8Params params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  GroupedWgradFp8Sm90<Tile, Out, kAccumulate>(params, smem).run();
}

}  // namespace dropless::cuda
