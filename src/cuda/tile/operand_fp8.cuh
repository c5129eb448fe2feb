// Operands and scales of the FP8 products: stages of 128 contraction elements, which is a row of
// 128 bytes and the length of a scale's block, and the loop that multiplies them.
#pragma once

#include "cuda/ptx/wgmma_e4m3.cuh"
#include "cuda/tile/fp8_tile.h"
#include "cuda/tile/operand.cuh"

namespace dropless::cuda {

template <class Tile>
struct Fp8Stages {
  static constexpr int kLhsBytes = Tile::kRows * kFp8Block;
  static constexpr int kStageBytes = Tile::kStageBytes;
  // One scale for every row of lhs, and one for every 64 columns of rhs.
  static constexpr int kRhsScales = Tile::kCols / kChunk;
  static_assert(kRhsScales <= 4);
  static constexpr int kScales = (Tile::kRows + kRhsScales + 3) / 4 * 4;
  static constexpr int kScaleBytes = Tile::kStages * kScales * 4;
  static constexpr int kBarrierBytes = 2 * Tile::kStages * 8;
  static constexpr int kReaders = 2 * Tile::kCluster;
  using State = PipelineState<Tile::kStages>;

  uint8_t* data;    // [stages][lhs, rhs], 1024-byte aligned
  float* scales;    // [stages][kScales]: of lhs, then of rhs
  uint64_t* full;   // [stages]
  uint64_t* empty;  // [stages]

  __device__ Fp8Stages(uint8_t* stages, uint8_t* scales_and_barriers)
      : data(stages),
        scales(reinterpret_cast<float*>(scales_and_barriers)),
        full(reinterpret_cast<uint64_t*>(scales_and_barriers + kScaleBytes)),
        empty(full + Tile::kStages) {}

  __device__ void init() const {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(full + i, 1 + 32);  // the operands' thread and the scales' warp
      ptx::mbarrier_init(empty + i, kReaders);
    }
  }

  __device__ __forceinline__ uint8_t* lhs(int stage) const { return data + stage * kStageBytes; }
  __device__ __forceinline__ uint8_t* rhs(int stage) const { return lhs(stage) + kLhsBytes; }
  __device__ __forceinline__ float* scale(int stage) const { return scales + stage * kScales; }

  // Producer of operands, one thread: waits until the stage is free and announces its bytes.
  __device__ __forceinline__ void acquire(const State& state) const {
    ptx::mbarrier_wait(empty + state.stage, state.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full + state.stage, kStageBytes);
  }

  // Consumer, whole warpgroup: one thread speaks for it to each block.
  __device__ __forceinline__ void release(int stage, int thread) const {
    if (Tile::kCluster == 1) {
      if (thread == 0) ptx::mbarrier_arrive(empty + stage);
    } else {
      if (thread < Tile::kCluster) ptx::mbarrier_arrive_cluster(empty + stage, thread);
    }
  }

  // Consumer: multiplies `blocks` stages into 64 rows, the tile's half `half`.
  __device__ __forceinline__ void multiply(float (&acc)[Tile::kCols / 2], State& state, int blocks,
                                           int half, int thread) const {
    constexpr int kChunks = Tile::kCols / Tile::kChunkCols;
    static_assert(Tile::kCols % Tile::kChunkCols == 0);
    float scratch[Tile::kChunkCols / 2];
    Scales stage_scales;
    // Nothing but additions stands between a full stage and its first product.
    const uint64_t descriptor = OperandLayout<Major::kK>::descriptor(lhs(0) + half * kChunkBytes);
    const uint32_t lhs_base = ptx::kept(static_cast<uint32_t>(descriptor));
    const uint64_t layout = descriptor >> 32 << 32;  // the same for both
    const uint32_t smem = ptx::kept(ptx::shared_address(scales));
    const uint32_t full_at = smem + kScaleBytes, col_scales = smem + Tile::kRows * 4;
    const uint32_t row_scales =
        ptx::kept(smem + (half * kChunk + thread / 32 * 16 + thread % 32 / 4) * 4);
    const uint32_t lhs_to_rhs = (kLhsBytes - half * kChunkBytes) / 16;
#pragma unroll
    for (float& value : acc) value = 0.0f;
      // Products overwrite the scratch, but an unset register would count as read by them, hence as
      // occupied from one tile to the next.
#pragma unroll
    for (float& value : scratch) value = 0.0f;
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full_at + state.stage * 8, state.phase);
      const uint32_t offset = state.stage * (kStageBytes / 16);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint32_t a = lhs_base + offset;
        const uint32_t b = a + lhs_to_rhs + chunk * (Tile::kChunkCols * kFp8Block / 16);
        ptx::wgmma_pin(scratch);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          // In the products' shadow, and before the last of them: whoever sees the products done
          // may give the stage away.
          if (chunk == 0 && step == 3) {
            stage_scales.load(row_scales + state.stage * (kScales * 4),
                              col_scales + state.stage * (kScales * 4));
          }
          ptx::wgmma_e4m3(scratch, layout | (a + 2 * step), layout | (b + 2 * step), step);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        if (chunk == kChunks - 1) release(state.stage, thread);
        promote(acc, scratch, chunk * Tile::kChunkCols, stage_scales);
      }
      state.advance();
    }
  }

  // Consumer: passes over stages that hold nothing for it: as Stages in operand.cuh.
  __device__ __forceinline__ void drain(State& state, int blocks, int warpgroup, int thread) const {
    if (thread < 32) {
      State ahead = state;
      for (int block = 0; block < blocks; ++block) {
        ptx::mbarrier_wait(full + ahead.stage, ahead.phase);
        release(ahead.stage, thread);
        ahead.advance();
      }
    }
    state.advance(blocks);
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroup);
  }

 private:
  // The scales a thread needs of one stage: of its rows r and r + 8, and of every 64 columns.
  struct Scales {
    float row[2];
    float col[kRhsScales];

    // From shared-memory addresses.
    __device__ __forceinline__ void load(uint32_t row_scale, uint32_t col_scale) {
      row[0] = ptx::load_shared(row_scale);
      row[1] = ptx::load_shared(row_scale + 8 * 4);
      const float4 four = ptx::load_shared_16(col_scale);
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < kRhsScales; ++i) col[i] = values[i];
    }
  };

  // acc += scratch * scale of the row * scale of the column, for the chunk that starts at `first`.
  __device__ static __forceinline__ void promote(float (&acc)[Tile::kCols / 2],
                                                 float (&scratch)[Tile::kChunkCols / 2], int first,
                                                 const Scales& scales) {
    ptx::wgmma_pin(scratch);
#pragma unroll
    for (int j = 0; j < Tile::kChunkCols / 8; ++j) {
      const float col = scales.col[(first + 8 * j) / kChunk];
      float* to = acc + first / 2 + 4 * j;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = __fmul_rn(scales.row[half], col);
        to[2 * half] = __fmaf_rn(scratch[4 * j + 2 * half], scale, to[2 * half]);
        to[2 * half + 1] = __fmaf_rn(scratch[4 * j + 2 * half + 1], scale, to[2 * half + 1]);
      }
    }
  }
};

}  // namespace dropless::cuda
