// Epilogue of the plain product: (+ bias) rounded to the output's type.
#pragma once

#include <type_traits>

#include "cuda/tile/result.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

// Zeroes `bytes` (a multiple of 16) at a 16-byte boundary; one warp.
__device__ __forceinline__ void zero_bytes(uint8_t* out, int64_t bytes, int lane) {
  for (int64_t i = lane * 16; i < bytes; i += 512) {
    *reinterpret_cast<uint4*>(out + i) = make_uint4(0, 0, 0, 0);
  }
}

// Results of 64 rows that wait to be stored, rounded: kPairs registers of two columns a thread.
template <int kPairs>
struct PendingBlock {
  uint32_t pairs[kPairs];
  int row, col;
  int rows = 0;  // none: nothing waits

  __device__ __forceinline__ void collect(const float (&acc)[2 * kPairs], const RowTile& tile,
                                          int first, int count) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
    row = first;
    col = tile.col;
    rows = count;
  }
};

template <class Out>
class StoreEpilogue {
 public:
  static constexpr int kMatrices = 1;
  template <class Tile>
  using Staging = ResultStagingOf<Tile>;
  struct Params {
    ResultMatrix out;   // [M, N]
    const float* bias;  // [E, N] or null
  };

  __device__ explicit StoreEpilogue(const Params& params) : params_(params) {}

  template <int kRows, int kCols, class Staging>
  __device__ __forceinline__ void prepare(const RowTile&, int, int, Staging&) const {}

  // Stores rows `row` .. row + rows - 1 of the tile, in blocks of 64.
  template <int kRowTiles, int kAll, class Staging>
  __device__ __forceinline__ void store(float (&acc)[kRowTiles][kAll], const RowTile& tile, int row,
                                        int rows, Staging& staging) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (rows > i * kChunk) {
        store_block<2 * kAll>(acc[i], tile, row + i * kChunk, min(rows - i * kChunk, kChunk),
                              staging);
      }
    }
  }

  // The same later: takes the results of a block of 64 rows out of the accumulators, and stores
  // them in steps. In turns there is nothing to hide, and float32 needs twice the registers.
  static constexpr bool kDeferred = true;
  template <class Tile>
  static constexpr bool kStepped = !Tile::kPingpong && std::is_same_v<Out, __nv_bfloat16>;
  template <class Tile>
  using Pending = PendingBlock<Tile::kCols / 4>;
  template <class Tile>
  static constexpr int kSteps = Tile::kCols / kChunk;

  template <int kAll>
  __device__ __forceinline__ void collect(float (&acc)[kAll], const RowTile& tile, int row,
                                          int rows, PendingBlock<kAll / 2>& pending,
                                          int thread) const {
    if (params_.bias != nullptr) add_bias<2 * kAll>(acc, tile, thread % 4 * 2);
    pending.collect(acc, tile, row, rows);
  }

  template <class Index, int kPairs, class Staging>
  __device__ __forceinline__ void step(Index index, const PendingBlock<kPairs>& pending,
                                       Staging& staging) const {
    if (pending.rows == 0) return;
    staging.write_pairs([&](int i) { return pending.pairs[index.value * 16 + i]; });
    staging.template send<Out>(params_.out, pending.col + index.value * kChunk, pending.row, 0,
                               pending.rows);
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    zero_bytes(params.out.data + row * params.out.row_bytes,
               static_cast<int64_t>(params.out.cols) * sizeof(Out), lane);
  }

 private:
  template <int kCols, class Staging>
  __device__ __forceinline__ void store_block(float (&acc)[kCols / 2], const RowTile& tile, int row,
                                              int rows, Staging& staging) const {
    if (params_.bias != nullptr) add_bias<kCols>(acc, tile, staging.thread() % 4 * 2);
    constexpr int kRegisters = kResultCols<Out> / 2;
#pragma unroll
    for (int chunk = 0; chunk < kCols / kResultCols<Out>; ++chunk) {
      staging.write(Out{}, [&](int i) { return acc[chunk * kRegisters + i]; });
      staging.template send<Out>(params_.out, tile.col + chunk * kResultCols<Out>, row, 0, rows);
    }
  }

  template <int kCols>
  __device__ __forceinline__ void add_bias(float (&acc)[kCols / 2], const RowTile& tile,
                                           int lane_col) const {
    const float* bias = params_.bias + static_cast<int64_t>(tile.expert) * params_.out.cols;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const int col = tile.col + j * 8 + lane_col;
      if (col >= params_.out.cols) continue;
      const float2 b = __ldg(reinterpret_cast<const float2*>(bias + col));
      acc[4 * j] += b.x;
      acc[4 * j + 1] += b.y;
      acc[4 * j + 2] += b.x;
      acc[4 * j + 3] += b.y;
    }
  }

  const Params& params_;
};

}  // namespace dropless::cuda
