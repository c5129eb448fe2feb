// Epilogue of expert_up in FP8: h = (gate, up) + biases rounded to bf16, or quantised; A =
// act(h_gate) * h_up from the rounded h, quantised from fp32 in blocks of one row and 128 columns.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/fp8_rows.cuh"
#include "cuda/tile/fp8_tile.h"

namespace dropless::cuda {

// A tile holds 128 columns of gate in its left half and the same columns of up in its right half:
// the four lanes that share a row have a whole block of A.
template <ActivationKind kActivation, bool kFp8H>
class SwigluFp8Epilogue {
 public:
  static constexpr int kMatrices = 2;
  template <class Tile>
  using Staging = ResultStagingOf<Tile>;
  struct Params {
    ResultMatrix h;          // planes gate, up of [M, I]; data is null if h is not wanted
    ResultMatrix a;          // [M, I]
    float* h_scale;          // [M, 2, ceil(I/128)] if kFp8H
    float* a_scale;          // [M, ceil(I/128)]
    const float* gate_bias;  // [E, I] or null
    const float* up_bias;    // [E, I] or null
    int blocks;              // ceil(I/128)
    ScaleRounding rounding;
  };

  __device__ explicit SwigluFp8Epilogue(const Params& params) : params_(params) {}

  template <int kRowTiles, int kAll, class Staging>
  __device__ __forceinline__ void store(float (&acc)[kRowTiles][kAll], const RowTile& tile, int row,
                                        int rows, Staging& staging) const {
    static_assert(kAll == 2 * fp8::kRowRegisters);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (rows > i * kChunk) {
        store_block(acc[i], tile, row + i * kChunk, min(rows - i * kChunk, kChunk), staging);
      }
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    zero_bytes(params.a.data + row * params.a.row_bytes, params.a.cols, lane);
    fp8::store_unit_scales(params.a_scale + static_cast<int64_t>(row) * params.blocks,
                           params.blocks, lane);
    if (params.h.data == nullptr) return;
    zero_bytes(params.h.data + row * params.h.row_bytes, params.h.row_bytes, lane);
    if (kFp8H) {
      fp8::store_unit_scales(params.h_scale + static_cast<int64_t>(row) * 2 * params.blocks,
                             2 * params.blocks, lane);
    }
  }

 private:
  static constexpr int kUp = fp8::kRowRegisters;  // first register of up

  template <int kAll, class Staging>
  __device__ __forceinline__ void store_block(float (&acc)[kAll], const RowTile& tile, int row,
                                              int rows, Staging& staging) const {
    if (params_.gate_bias != nullptr) add_bias(acc, params_.gate_bias, tile, staging.thread());
    if (params_.up_bias != nullptr) add_bias(acc + kUp, params_.up_bias, tile, staging.thread());
    if (params_.h.data != nullptr) {
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        store_h(acc + plane * kUp, tile.col, plane, row, rows, staging);
      }
    }
#pragma unroll
    for (int i = 0; i < kUp; ++i) {
      acc[i] = activate<kActivation>(round_bf16(acc[i])) * round_bf16(acc[kUp + i]);
    }
    store_codes(acc, params_.a, 0, tile.col, row, rows,
                params_.a_scale + static_cast<int64_t>(row) * params_.blocks, params_.blocks,
                staging);
  }

  template <class Staging>
  __device__ __forceinline__ void store_h(const float* h, int col, int plane, int row, int rows,
                                          Staging& staging) const {
    if constexpr (kFp8H) {
      store_codes(h, params_.h, plane, col, row, rows,
                  params_.h_scale + (static_cast<int64_t>(row) * 2 + plane) * params_.blocks,
                  2 * params_.blocks, staging);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        staging.write(__nv_bfloat16{}, [&](int i) { return h[chunk * 32 + i]; });
        staging.template send<__nv_bfloat16>(params_.h, col + chunk * kChunk, row, plane, rows);
      }
    }
  }

  // `scale` is that of the first row and block 0.
  template <class Staging>
  __device__ __forceinline__ void store_codes(const float* value, const ResultMatrix& to, int plane,
                                              int col, int row, int rows, float* scale, int stride,
                                              Staging& staging) const {
    const fp8::RowScales scales = fp8::row_scales(value, params_.rounding);
    fp8::write_codes(staging.address(), value, scales, staging.thread());
    staging.template send<uint8_t>(to, col, row, plane, rows);
    fp8::store_scales(scale + col / kFp8Block, stride, scales, rows, staging.thread());
  }

  __device__ __forceinline__ void add_bias(float* acc, const float* bias, const RowTile& tile,
                                           int thread) const {
    bias += static_cast<int64_t>(tile.expert) * params_.a.cols;
#pragma unroll
    for (int j = 0; j < fp8::kRowRegisters / 4; ++j) {
      const int col = tile.col + j * 8 + thread % 4 * 2;
      if (col >= params_.a.cols) continue;
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
