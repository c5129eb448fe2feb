// Epilogue of expert_up: h = (gate, up) + biases rounded to bf16, and A = act(h_gate) * h_up from
// the rounded h.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/activation.cuh"

namespace dropless::cuda {

// A tile holds columns c of gate in its left half and the same columns of up in its right half, so
// each thread has both in registers.
template <ActivationKind kActivation>
class SwigluEpilogue {
 public:
  static constexpr int kMatrices = 2;
  template <class Tile>
  using Staging = ResultStagingOf<Tile>;
  struct Params {
    ResultMatrix h;          // planes gate, up of [M, I]; data is null if h is not wanted
    ResultMatrix a;          // [M, I]
    const float* gate_bias;  // [E, I] or null
    const float* up_bias;    // [E, I] or null
  };

  __device__ explicit SwigluEpilogue(const Params& params) : params_(params) {}

  template <int kRows, int kCols, class Staging>
  __device__ __forceinline__ void prepare(const RowTile&, int, int, Staging&) const {}

  template <int kAll, class Staging>
  __device__ __forceinline__ void store(float (&block)[1][kAll], const RowTile& tile, int row,
                                        int rows, Staging& staging) const {
    constexpr int kCols = 2 * kAll;
    float(&acc)[kAll] = block[0];
    constexpr int kUp = kCols / 4;  // first register of up
    const int lane_col = staging.thread() % 4 * 2;
    if (params_.gate_bias != nullptr) add_bias<kCols, 0>(acc, params_.gate_bias, tile, lane_col);
    if (params_.up_bias != nullptr) add_bias<kCols, kUp>(acc, params_.up_bias, tile, lane_col);
#pragma unroll
    for (int chunk = 0; chunk < kCols / 128; ++chunk) {
      const int col = tile.col + chunk * kChunk;
      const int gate = chunk * 32, up = kUp + chunk * 32;
      if (params_.h.data != nullptr) {
        staging.write(__nv_bfloat16{}, [&](int i) { return acc[gate + i]; });
        staging.template send<__nv_bfloat16>(params_.h, col, row, 0, rows);
        staging.write(__nv_bfloat16{}, [&](int i) { return acc[up + i]; });
        staging.template send<__nv_bfloat16>(params_.h, col, row, 1, rows);
      }
      staging.write(__nv_bfloat16{}, [&](int i) {
        return gated<kActivation>(round_bf16(acc[gate + i]), round_bf16(acc[up + i]));
      });
      staging.template send<__nv_bfloat16>(params_.a, col, row, 0, rows);
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    const int64_t bytes = static_cast<int64_t>(params.a.cols) * 2;
    zero_bytes(params.a.data + row * params.a.row_bytes, bytes, lane);
    if (params.h.data != nullptr)
      zero_bytes(params.h.data + row * params.h.row_bytes, 2 * bytes, lane);
  }

 private:
  template <int kCols, int kFirst>
  __device__ __forceinline__ void add_bias(float (&acc)[kCols / 2], const float* bias,
                                           const RowTile& tile, int lane_col) const {
    bias += static_cast<int64_t>(tile.expert) * params_.a.cols;
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      const int col = tile.col + j * 8 + lane_col;
      if (col >= params_.a.cols) continue;
      const float2 b = __ldg(reinterpret_cast<const float2*>(bias + col));
      acc[kFirst + 4 * j] += b.x;
      acc[kFirst + 4 * j + 1] += b.y;
      acc[kFirst + 4 * j + 2] += b.x;
      acc[kFirst + 4 * j + 3] += b.y;
    }
  }

  const Params& params_;
};

}  // namespace dropless::cuda
