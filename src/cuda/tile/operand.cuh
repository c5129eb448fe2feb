// Operands of the sm_90a products: loading them by TMA into a pipeline of shared-memory stages, and
// multiplying a stage.
//
// An operand's stage is a row of chunks (gemm_tile.h). K-major: chunk c holds rows 64c .. 64c+63 of the
// operand, 64 contraction elements each. MN-major: chunk c holds 64 contraction steps of columns
// 64c .. 64c+63. Both are swizzled by 128 bytes.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/gemm_tile.h"

namespace dropless::cuda {

enum class Major { kK, kMn };

inline constexpr int kWarpgroup = 128;
// Named barriers: one for each consumer warpgroup, and one that delays the second one's start.
inline constexpr int kWarpgroupBarrier = 1;  // + warpgroup
inline constexpr int kStartBarrier = 3;

// Position in the ring of stages.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int steps) {
    const int position = stage + steps;
    phase ^= (position / kStages) & 1;
    stage = position % kStages;
  }
};

// Loads kChunks chunks of an operand whose first row (or column) is `mn` and whose first contraction element
// is `k`. In a cluster every chunk travels in two halves; if `shared`, this block sends its half to both.
template <Major kMajor, int kChunks, int kCluster>
__device__ __forceinline__ void load_chunks(uint8_t* smem, const CUtensorMap* map,
                                            uint64_t* barrier, int mn, int k, int plane,
                                            bool shared, int rank) {
  constexpr int kPart = kChunk / kCluster;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int part = 0; part < kCluster; ++part) {
      if (kCluster > 1 && shared && part != rank) continue;
      const int column = kMajor == Major::kK ? k : mn + chunk * kChunk;
      const int row = kMajor == Major::kK ? mn + chunk * kChunk + part * kPart : k + part * kPart;
      uint8_t* destination = smem + chunk * kChunkBytes + part * (kChunkBytes / kCluster);
      if (kCluster > 1 && shared) {
        ptx::tma_load_multicast(destination, map, barrier, column, row, plane, 3);
      } else {
        ptx::tma_load(destination, map, barrier, column, row, plane);
      }
    }
  }
}

template <Major kMajor>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t smem_address) {
  // Eight rows of 128 bytes make one swizzle atom; MN-major chunks follow each other.
  return ptx::matrix_descriptor(smem_address, kMajor == Major::kMn ? kChunkBytes : 16, 1024);
}

// Step of a descriptor's address field (16-byte units) for 16 contraction elements.
template <Major kMajor>
inline constexpr int kDescriptorStep = kMajor == Major::kK ? 2 : 128;

// acc (+)= a * b over the 64 contraction elements of one stage; kRowTiles blocks of 64 rows.
template <Major kLhsMajor, Major kRhsMajor, int kRowTiles, int kRegisters>
__device__ __forceinline__ void multiply_stage(float (&acc)[kRowTiles][kRegisters], uint64_t lhs,
                                               uint64_t rhs, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::wgmma<kLhsMajor == Major::kMn, kRhsMajor == Major::kMn>(
          acc[i], lhs + i * (kChunkBytes / 16) + step * kDescriptorStep<kLhsMajor>,
          rhs + step * kDescriptorStep<kRhsMajor>, accumulate || step > 0);
    }
  }
}

// Zeroes rows begin .. end - 1 of kChunks chunks; one warpgroup. Whole rows, so the swizzle does not matter.
template <int kChunks>
__device__ __forceinline__ void zero_rows(uint8_t* chunks, int begin, int end, int thread) {
  const uint32_t base = ptx::shared_address(chunks) + thread % 8 * 16;
  for (int i = thread / 8; i < kChunks * (end - begin); i += kWarpgroup / 8) {
    const int row = begin + i / kChunks;
    ptx::store_shared_zero16(base + i % kChunks * kChunkBytes + row * 128);
  }
}

// The stages of one block and their barriers.
template <class Tile, Major kLhsMajor, Major kRhsMajor>
struct Stages {
  static constexpr int kLhsBytes = Tile::kRows * kChunk * 2;
  static constexpr int kStageBytes = Tile::kStageBytes;
  // Warpgroups that read a stage, in all blocks whose loads may write it.
  static constexpr int kReaders = (Tile::kPingpong ? 1 : 2) * Tile::kCluster;
  using State = PipelineState<Tile::kStages>;

  uint8_t* data;    // [stages][lhs, rhs], 1024-byte aligned
  uint64_t* full;   // [stages]
  uint64_t* empty;  // [stages]
  uint64_t* turn;   // [2] whose turn it is to multiply, if the warpgroups take turns

  static constexpr int kBarriers = 2 * Tile::kStages + 2;

  __device__ Stages(uint8_t* stages, uint8_t* barriers)
      : data(stages),
        full(reinterpret_cast<uint64_t*>(barriers)),
        empty(full + Tile::kStages),
        turn(empty + Tile::kStages) {}

  __device__ void init() const {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::mbarrier_init(empty + i, kReaders);
    }
    ptx::mbarrier_init(turn, 1);
    ptx::mbarrier_init(turn + 1, 1);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint8_t* lhs(int stage) const { return data + stage * kStageBytes; }
  __device__ __forceinline__ uint8_t* rhs(int stage) const { return lhs(stage) + kLhsBytes; }

  // Producer, one thread: waits until the stage is free and announces its bytes.
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

  // Consumer: multiplies `blocks` stages into kRowTiles row blocks, starting at 64-row chunk `chunk`.
  // With one product in flight, a stage is released while the next one is being multiplied.
  // issued(block) is called after each block's product has been issued.
  template <int kRowTiles, int kRegisters, class Issued>
  __device__ __forceinline__ void multiply(float (&acc)[kRowTiles][kRegisters], State& state,
                                           int blocks, int chunk, int thread, Issued issued) const {
    const uint64_t lhs_base =
        operand_descriptor<kLhsMajor>(ptx::shared_address(lhs(0)) + chunk * kChunkBytes);
    const uint64_t rhs_base = operand_descriptor<kRhsMajor>(ptx::shared_address(rhs(0)));
    int previous = 0;
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full + state.stage, state.phase);
      ptx::wgmma_fence();
      const uint32_t offset = state.stage * (kStageBytes / 16);
      multiply_stage<kLhsMajor, kRhsMajor>(acc, lhs_base + offset, rhs_base + offset,
                                                      block > 0);
      ptx::wgmma_commit_group();
      issued(block);
      ptx::wgmma_wait_group<1>();
      if (block > 0) release(previous, thread);
      previous = state.stage;
      state.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(previous, thread);
  }

  // Consumer, MN-major operands: as multiply, over `depth` contraction rows of which the last stage may hold
  // fewer than 64. Both operands are zeroed past them up to the next step of 16, because what lies there
  // belongs to the next group and 0 * Inf is NaN.
  template <int kRowTiles, int kRegisters, class Issued>
  __device__ __forceinline__ void multiply_ragged(float (&acc)[kRowTiles][kRegisters], State& state,
                                                  int depth, int chunk, int thread, int barrier,
                                                  Issued issued) const {
    const uint64_t lhs_base =
        operand_descriptor<kLhsMajor>(ptx::shared_address(lhs(0)) + chunk * kChunkBytes);
    const uint64_t rhs_base = operand_descriptor<kRhsMajor>(ptx::shared_address(rhs(0)));
    const int blocks = (depth + kChunk - 1) / kChunk;
    int previous = 0;
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full + state.stage, state.phase);
      const int left = depth - block * kChunk;
      if (left < kChunk) {
        zero_rows<kRowTiles>(lhs(state.stage) + chunk * kChunkBytes, left, kChunk, thread);
        zero_rows<Tile::kCols / kChunk>(rhs(state.stage), left, kChunk, thread);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(barrier, kWarpgroup);
      }
      ptx::wgmma_fence();
      const uint32_t offset = state.stage * (kStageBytes / 16);
      multiply_stage<kLhsMajor, kRhsMajor>(acc, lhs_base + offset, rhs_base + offset, block > 0);
      ptx::wgmma_commit_group();
      issued(block);
      ptx::wgmma_wait_group<1>();
      if (block > 0) release(previous, thread);
      previous = state.stage;
      state.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(previous, thread);
  }

  // Consumer: waits for its n-th turn. Without turns a warpgroup would look at a stage several rounds ahead,
  // where a barrier's parity no longer tells rounds apart.
  __device__ __forceinline__ void await_turn(int warpgroup, int n) const {
    ptx::mbarrier_wait(turn + warpgroup, (n + 1 - warpgroup) & 1);
  }

  __device__ __forceinline__ void pass_turn(int warpgroup, int thread) const {
    if (thread == 0) ptx::mbarrier_arrive(turn + (1 - warpgroup));
  }

  // Consumer: passes over stages that hold nothing for it.
  __device__ __forceinline__ void drain(State& state, int blocks, int thread) const {
    for (int block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(full + state.stage, state.phase);
      release(state.stage, thread);
      state.advance();
    }
  }
};

}  // namespace dropless::cuda
