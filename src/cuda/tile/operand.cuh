// Operands of the sm_90a products: loading them by TMA into a pipeline of shared-memory stages, and
// multiplying a stage. (gathered_rows.cuh: loading one of them without TMA.)
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/gemm_tile.h"

namespace dropless::cuda {

// Which operand's rows are looked up one by one and copied by the loading threads
// (gathered_rows.cuh) instead of the copy engine.
enum class Gathered { kNone, kLhs, kRhs };

inline constexpr int kWarpgroup = 128;
// Named barriers of the consumer warpgroups.
inline constexpr int kWarpgroupBarrier = 1;  // + warpgroup

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

// A stage of an operand of n rows (K-major) or columns (MN-major) is n / 64 chunks of 8 KiB,
// swizzled by 128 bytes:
//   K-major:  64 rows of 64 contraction elements;
//   MN-major: 64 contraction steps of 64 columns.
// Larger boxes would need fewer copies, and measured slower.
template <Major kMajor>
struct OperandLayout {
  // Eight rows of 128 bytes make one swizzle atom.
  __device__ static __forceinline__ uint64_t descriptor(const uint8_t* chunk) {
    return ptx::matrix_descriptor(ptx::shared_address(chunk),
                                  kMajor == Major::kK ? 16 : kChunkBytes, 1024);
  }
  // From one step of 16 contraction elements to the next, in a descriptor's units of 16 bytes.
  static constexpr int kStep = kMajor == Major::kK ? 2 : 128;
};

// Loads kChunks chunks whose first row (column) is `mn` and whose first contraction element is `k`.
// In a cluster, if `shared`, this block loads its half of them for both blocks. K-major chunks may
// have another number of rows than 64, a multiple of 8: kWidth.
template <Major kMajor, int kChunks, int kCluster, int kWidth = kChunk>
__device__ __forceinline__ void load_chunks(uint8_t* smem, const CUtensorMap* map,
                                            uint64_t* barrier, int mn, int k, int plane,
                                            bool shared, int rank) {
  static_assert(kChunks % kCluster == 0);
  static_assert(kMajor == Major::kK || kWidth == kChunk);
  constexpr int kShare = kChunks / kCluster;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = kCluster > 1 && shared ? i + rank * kShare : i;
    if (kCluster > 1 && shared && i >= kShare) break;
    const int at = mn + chunk * kWidth;
    const int column = kMajor == Major::kK ? k : at, row = kMajor == Major::kK ? at : k;
    if (kCluster > 1 && shared) {
      ptx::tma_load_multicast(smem + chunk * kWidth * kChunk * 2, map, barrier, column, row, plane,
                              3);
    } else {
      ptx::tma_load(smem + chunk * kWidth * kChunk * 2, map, barrier, column, row, plane);
    }
  }
}

// Calls function(integral_constant<int, 0>()) and so on to kCount - 1.
template <int kCount, class Function>
__device__ __forceinline__ void for_each_index(const Function& function) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (function(std::integral_constant<int, kIndex>()), ...);
  }
  (std::make_integer_sequence<int, kCount>());
}

struct NoStep {
  template <class Index>
  __device__ __forceinline__ void operator()(Index) const {}
};

// Zeros fill a contraction that ends inside a block of kChunk.
struct EveryStep {};

// The stages of one block and their barriers.
template <class Tile, Major kLhsMajor, Major kRhsMajor, Gathered kGathered = Gathered::kNone>
struct Stages {
  static constexpr int kLhsBytes = Tile::kRows * kChunk * 2;
  static constexpr int kStageBytes = Tile::kStageBytes;
  // Of these the copy engine brings:
  static constexpr int kEngineBytes = kGathered == Gathered::kNone  ? kStageBytes
                                      : kGathered == Gathered::kLhs ? kStageBytes - kLhsBytes
                                                                    : kLhsBytes;
  // A stage is full when the engine's bytes were announced and arrived and, if rows are gathered,
  // every loading thread's copies landed.
  static constexpr int kWriters = kGathered == Gathered::kNone ? 1 : 1 + kWarpgroup;
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
      ptx::mbarrier_init(full + i, kWriters);
      ptx::mbarrier_init(empty + i, kReaders);
    }
    ptx::mbarrier_init(turn, 1);
    ptx::mbarrier_init(turn + 1, 1);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint8_t* lhs(int stage) const { return data + stage * kStageBytes; }
  __device__ __forceinline__ uint8_t* rhs(int stage) const { return lhs(stage) + kLhsBytes; }

  // Producer, every thread that writes: waits until the stage is free.
  __device__ __forceinline__ void await_free(const State& state) const {
    ptx::mbarrier_wait(empty + state.stage, state.phase ^ 1);
  }

  // Producer, one thread: announces what the copy engine brings.
  __device__ __forceinline__ void announce(int stage) const {
    ptx::mbarrier_arrive_expect_tx(full + stage, kEngineBytes);
  }

  // Producer, every thread: counts as a writer once its copies so far have landed.
  __device__ __forceinline__ void arrive_when_copied(int stage) const {
    ptx::copy_async_arrive(full + stage);
  }

  // Consumer, whole warpgroup: one thread speaks for it to each block.
  __device__ __forceinline__ void release(int stage, int thread) const {
    if (Tile::kCluster == 1) {
      if (thread == 0) ptx::mbarrier_arrive(empty + stage);
    } else {
      if (thread < Tile::kCluster) ptx::mbarrier_arrive_cluster(empty + stage, thread);
    }
  }

  // Consumer: multiplies `blocks` stages into kRowTiles blocks of 64 rows, starting at 64-row chunk
  // `chunk`. With one product in flight, a stage is released while the next one is being
  // multiplied. Of the last block only `last_steps` steps of 16 contraction elements are
  // multiplied, or all if it is EveryStep. Calls prepare(block, stage) before a block's product and
  // issued(block) after issuing it. Work that needs no operands, step(index) for index = 0 ..
  // kSteps - 1, is done beside the first products, one each; the index is a type, for registers
  // have no addresses.
  template <int kSteps = 0, int kRowTiles, int kRegisters, class LastSteps, class Prepare,
            class Issued, class Step = NoStep>
  __device__ __forceinline__ void multiply(float (&acc)[kRowTiles][kRegisters], State& state,
                                           int blocks, int chunk, int thread, LastSteps last_steps,
                                           Prepare prepare, Issued issued, Step step = {}) const {
    using Lhs = OperandLayout<kLhsMajor>;
    using Rhs = OperandLayout<kRhsMajor>;
    constexpr bool kWhole = std::is_same_v<LastSteps, EveryStep>;
    constexpr bool kZeroed = Tile::kPingpong && kWhole;
    const uint64_t lhs_base = Lhs::descriptor(lhs(0) + chunk * kChunkBytes);
    const uint64_t rhs_base = Rhs::descriptor(rhs(0));
    int previous = 0;
    // In turns, the epilogue of one tile needs its registers: one that the first product overwrites
    // without being set here would count as read by it, hence as occupied from tile to tile.
    if constexpr (kZeroed) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kRegisters; ++j) acc[i][j] = 0.0f;
      }
    }
    const auto await_full = [&](int block) {
      ptx::mbarrier_wait(full + state.stage, state.phase);
      // The copy engine writes as wgmma reads, through the asynchronous proxy; threads do not.
      if (kGathered != Gathered::kNone) ptx::fence_proxy_async();
      prepare(block, state.stage);
    };
    const auto product = [&](int block, int step) {
      const uint32_t offset = state.stage * (kStageBytes / 16);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::wgmma<kLhsMajor == Major::kMn, kRhsMajor == Major::kMn>(
            acc[i], lhs_base + offset + i * (kChunkBytes / 16) + step * Lhs::kStep,
            rhs_base + offset + step * Rhs::kStep, kZeroed || block > 0 || step > 0);
      }
    };
    const int whole = kWhole ? blocks : blocks - 1;
    const auto multiply_block = [&](int block) {
      await_full(block);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step) product(block, step);
      ptx::wgmma_commit_group();
      issued(block);
      ptx::wgmma_wait_group<1>();
      if (block > 0) release(previous, thread);
      previous = state.stage;
      state.advance();
    };
    for_each_index<kSteps>([&](auto index) {
      if (index.value < whole) multiply_block(index.value);
      step(index);
    });
    for (int block = kSteps; block < whole; ++block) multiply_block(block);
    if constexpr (!kWhole) {
      await_full(whole);
      // Each step is a group of its own: ptxas serialises a group of unknown length.
#pragma unroll 1
      for (int step = 0; step < last_steps; ++step) {
        ptx::wgmma_fence();
        product(whole, step);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
      }
      issued(whole);
      if (whole > 0) release(previous, thread);
      previous = state.stage;
      state.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(previous, thread);
  }

  // Consumer, MN-major operands: zeroes contraction elements first .. end - 1 of this warpgroup's
  // kRowTiles chunks of lhs and of all of rhs. (Two warpgroups may both write the same zeros to
  // rhs.)
  template <int kRowTiles>
  __device__ __forceinline__ void zero_tail(int stage, int first, int end, int chunk, int thread,
                                            int barrier) const {
    static_assert(kLhsMajor == Major::kMn && kRhsMajor == Major::kMn);
    zero_rows<kRowTiles>(lhs(stage) + chunk * kChunkBytes, first, end, thread);
    zero_rows<Tile::kCols / kChunk>(rhs(stage), first, end, thread);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(barrier, kWarpgroup);
  }

  // Consumer: waits for its n-th turn. Without turns a warpgroup would look at a stage several
  // rounds ahead, where a barrier's parity no longer tells rounds apart.
  __device__ __forceinline__ void await_turn(int warpgroup, int n) const {
    ptx::mbarrier_wait(turn + warpgroup, (n + 1 - warpgroup) & 1);
  }

  __device__ __forceinline__ void pass_turn(int warpgroup, int thread) const {
    if (thread == 0) ptx::mbarrier_arrive(turn + (1 - warpgroup));
  }

  // Consumer: passes over stages that hold nothing for it. One thread looks at them; the others
  // wait for it, for a thread that came late could find a barrier two phases on and wait for ever.
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
  template <int kChunks>
  __device__ static __forceinline__ void zero_rows(uint8_t* smem, int first, int end, int thread) {
    // Whole 128-byte rows, eight threads each, so the swizzle does not matter.
    const uint32_t base = ptx::shared_address(smem) + thread % 8 * 16;
    for (int i = thread / 8; i < kChunks * (end - first); i += kWarpgroup / 8) {
      ptx::store_shared_zero16(base + i % kChunks * kChunkBytes + (first + i / kChunks) * 128);
    }
  }
};

}  // namespace dropless::cuda
