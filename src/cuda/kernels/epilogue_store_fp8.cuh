// Epilogue of the plain FP8 products: (+ bias) rounded to the output's type.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/fp8_tile.h"
#include "cuda/tile/handoff.cuh"

namespace dropless::cuda {

template <class Out>
class StoreFp8Epilogue {
 public:
  static constexpr int kMatrices = 1;
  static constexpr int kStorers = 0;
  template <class Tile>
  static constexpr int kBoxes = Tile::kCols / kResultCols<Out>;
  using Params = typename StoreEpilogue<Out>::Params;

  template <int kAll, class Half>
  __device__ static __forceinline__ void hand_over(const Params& params, float (&acc)[kAll],
                                                   const RowTile& tile, int, int, Half& half,
                                                   int thread) {
    if (params.bias != nullptr) {
      add_bias<2 * kAll>(acc, params.bias + static_cast<int64_t>(tile.expert) * params.out.cols,
                         tile.col, params.out.cols, thread);
    }
    half.await_free();
#pragma unroll
    for (int i = 0; i < Half::kBoxes; ++i) {
      write_box(half.address(i), acc + i * (kAll / Half::kBoxes), Out{}, thread);
    }
    half.hand_over();
  }

  class Store {
   public:
    static constexpr int kBytes = 0;
    using Team = StoringTeam<kFp8Team<kStorers>>;

    __device__ Store(const Params& params, const Team& team, uint8_t*, uint64_t*)
        : params_(params), team_(team) {}

    template <class Half>
    __device__ __forceinline__ void operator()(const RowTile& tile, int row, int rows, Half& half) {
      half.await_ready();
#pragma unroll
      for (int i = 0; i < Half::kBoxes; ++i) {
        team_.template send<Out>(half.box(i), params_.out, tile.col + i * kResultCols<Out>, row, 0,
                                 rows);
      }
      if (team_.thread == 0) {
        ptx::tma_store_commit();
        ptx::tma_store_wait_read<0>();
      }
      half.release();
    }

   private:
    const Params& params_;
    const Team team_;
  };

  __device__ static void zero_row(const Params& params, int row, int lane) {
    StoreEpilogue<Out>::zero_row(params, row, lane);
  }
};

}  // namespace dropless::cuda
