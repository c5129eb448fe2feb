// Epilogue of the plain product: (+ bias) rounded to the output's type.
#pragma once

#include "cuda/tile/result.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

// Zeroes `bytes` (a multiple of 16) at a 16-byte boundary; one warp.
__device__ __forceinline__ void zero_bytes(uint8_t* out, int64_t bytes, int lane) {
  for (int64_t i = lane * 16; i < bytes; i += 512) {
    *reinterpret_cast<uint4*>(out + i) = make_uint4(0, 0, 0, 0);
  }
}

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
