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
  static constexpr int kScales = (Tile::kRows + kRhsScales + 3) / 4 * 4;
  static constexpr int kScaleBytes = Tile::kStages * kScales * 4;
  static constexpr int kBarrierBytes = (2 * Tile::kStages + 2) * 8;
  static constexpr int kReaders = (Tile::kPingpong ? 1 : 2) * Tile::kCluster;
  using State = PipelineState<Tile::kStages>;

  uint8_t* data;    // [stages][lhs, rhs], 1024-byte aligned
  float* scales;    // [stages][kScales]: of lhs, then of rhs
  uint64_t* full;   // [stages]
  uint64_t* empty;  // [stages]
  uint64_t* turn;   // [2] whose turn it is to multiply, if the warpgroups take turns

  __device__ Fp8Stages(uint8_t* stages, uint8_t* scales_and_barriers)
      : data(stages),
        scales(reinterpret_cast<float*>(scales_and_barriers)),
        full(reinterpret_cast<uint64_t*>(scales_and_barriers + kScaleBytes)),
        empty(full + Tile::kStages),
        turn(empty + Tile::kStages) {}

  __device__ void init() const {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(full + i, 1 + 32);  // the operands' thread and the scales' warp
      ptx::mbarrier_init(empty + i, kReaders);
    }
    ptx::mbarrier_init(turn, 1);
    ptx::mbarrier_init(turn + 1, 1);
    ptx::fence_mbarrier_init();
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

  // Consumer: multiplies `blocks` stages into kRowTiles blocks of 64 rows, starting at 64-row block
  // `first` of the tile. Calls issued(block) after issuing a stage's last product.
  template <int kRowTiles, class Issued>
  __device__ __forceinline__ void multiply(float (&acc)[kRowTiles][Tile::kCols / 2], State& state,
                                           int blocks, int first, int thread, Issued issued) const {
    constexpr int kChunkRow = Tile::kCols / Tile::kChunkCols;  // chunks side by side
    constexpr int kChunks = kRowTiles * kChunkRow, kDepth = Tile::kScratches - 1;
    static_assert(Tile::kCols % Tile::kChunkCols == 0);
    float scratch[Tile::kScratches][Tile::kChunkCols / 2];
    Scales<kRowTiles> scales;
    const uint64_t lhs_base = OperandLayout<Major::kK>::descriptor(lhs(0) + first * kChunkBytes);
    const uint64_t rhs_base = OperandLayout<Major::kK>::descriptor(rhs(0));
    const int row = first * kChunk + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kCols / 2; ++j) acc[i][j] = 0.0f;
    }
    // Products overwrite a scratch, but an unset register would count as read by them, hence as
    // occupied from one tile to the next: the epilogue could not use it.
#pragma unroll
    for (auto& chunk : scratch) {
#pragma unroll
      for (float& value : chunk) value = 0.0f;
    }
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full + state.stage, state.phase);
      scales.load(scale(state.stage), row);
      const uint32_t offset = state.stage * (kStageBytes / 16);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float(&target)[Tile::kChunkCols / 2] = scratch[c % Tile::kScratches];
        const uint64_t a = lhs_base + offset + c / kChunkRow * (kChunkBytes / 16);
        const uint64_t b = rhs_base + offset + c % kChunkRow * (Tile::kChunkCols * kFp8Block / 16);
        ptx::wgmma_pin(target);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          ptx::wgmma_e4m3(target, a + 2 * step, b + 2 * step, step);
        }
        ptx::wgmma_commit_group();
        if (c == kChunks - 1) {
          issued(block);
        } else if (c >= kDepth) {
          ptx::wgmma_wait_group<kDepth>();
          promote<kRowTiles>(acc, scratch[(c - kDepth) % Tile::kScratches], c - kDepth, scales);
        }
      }
      // The last chunks. ptxas would serialise products that overlap the next stage's.
      if constexpr (kDepth > 0 && kChunks > 1) {
        ptx::wgmma_wait_group<kDepth>();
        promote<kRowTiles>(acc, scratch[(kChunks - 2) % Tile::kScratches], kChunks - 2, scales);
      }
      ptx::wgmma_wait_group<0>();
      release(state.stage, thread);
      promote<kRowTiles>(acc, scratch[(kChunks - 1) % Tile::kScratches], kChunks - 1, scales);
      state.advance();
    }
  }

  // Consumer: waits for its n-th turn, passes it on, passes over stages that hold nothing for it:
  // as Stages in operand.cuh.
  __device__ __forceinline__ void await_turn(int warpgroup, int n) const {
    ptx::mbarrier_wait(turn + warpgroup, (n + 1 - warpgroup) & 1);
  }
  __device__ __forceinline__ void pass_turn(int warpgroup, int thread) const {
    if (thread == 0) ptx::mbarrier_arrive(turn + (1 - warpgroup));
  }
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
  // The scales a thread needs of one stage: of its rows r and r + 8 in each block of 64, and of
  // every 64 columns.
  template <int kRowTiles>
  struct Scales {
    float row[kRowTiles][2];
    float col[kRhsScales];

    __device__ __forceinline__ void load(const float* stage, int first_row) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        row[i][0] = stage[i * kChunk + first_row];
        row[i][1] = stage[i * kChunk + first_row + 8];
      }
#pragma unroll
      for (int i = 0; i < kRhsScales; ++i) col[i] = stage[Tile::kRows + i];
    }
  };

  // acc += scratch * scale of the row * scale of the column, for chunk c.
  template <int kRowTiles>
  __device__ static __forceinline__ void promote(float (&acc)[kRowTiles][Tile::kCols / 2],
                                                 float (&scratch)[Tile::kChunkCols / 2], int c,
                                                 const Scales<kRowTiles>& scales) {
    constexpr int kChunkRow = Tile::kCols / Tile::kChunkCols;
    const int i = c / kChunkRow, first = c % kChunkRow * Tile::kChunkCols;
    ptx::wgmma_pin(scratch);
#pragma unroll
    for (int j = 0; j < Tile::kChunkCols / 8; ++j) {
      const float col = scales.col[(first + 8 * j) / kChunk];
      float* to = acc[i] + first / 2 + 4 * j;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = __fmul_rn(scales.row[i][half], col);
        to[2 * half] = __fmaf_rn(scratch[4 * j + 2 * half], scale, to[2 * half]);
        to[2 * half + 1] = __fmaf_rn(scratch[4 * j + 2 * half + 1], scale, to[2 * half + 1]);
      }
    }
  }
};

}  // namespace dropless::cuda
