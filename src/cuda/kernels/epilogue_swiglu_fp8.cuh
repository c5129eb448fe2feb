// Epilogue of expert_up in FP8: h = (gate, up) + biases rounded to bf16, or quantised; A =
// act(h_gate) * h_up from the rounded h, quantised from fp32 in blocks of one row and 128 columns.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/fp8_rows.cuh"
#include "cuda/tile/fp8_tile.h"
#include "cuda/tile/handoff.cuh"

namespace dropless::cuda {

// A tile holds 128 columns of gate in its left half and the same columns of up in its right half.
// They are handed over in bf16: two boxes of gate, two of up. If h is quantised, its codes (one box
// of gate, one of up) and its scales leave first, from fp32, in a handoff of their own.
template <ActivationKind kActivation, bool kFp8H>
class SwigluFp8Epilogue {
 public:
  static constexpr int kMatrices = 2;
  static constexpr int kStorers = 1;
  template <class Tile>
  static constexpr int kBoxes = 4;
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

  template <int kAll, class Half>
  __device__ static __forceinline__ void hand_over(const Params& params, float (&acc)[kAll],
                                                   const RowTile& tile, int row, int rows,
                                                   Half& half, int thread) {
    static_assert(kAll == 2 * fp8::kRowRegisters);
    const int64_t bias = static_cast<int64_t>(tile.expert) * params.a.cols;
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      const float* from = plane == 0 ? params.gate_bias : params.up_bias;
      if (from == nullptr) continue;
      add_bias<kFp8Block>(acc + plane * fp8::kRowRegisters, from + bias, tile.col, params.a.cols,
                          thread);
    }
    if (kFp8H && params.h.data != nullptr) {
      half.await_free();
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const float* value = acc + plane * fp8::kRowRegisters;
        const fp8::RowScales scales = fp8::row_scales(value, params.rounding);
        fp8::write_codes(half.address(plane), value, scales, thread);
        fp8::store_scales(params.h_scale + (static_cast<int64_t>(row) * 2 + plane) * params.blocks +
                              tile.col / kFp8Block,
                          2 * params.blocks, scales, rows, thread);
      }
      half.hand_over();
    }
    half.await_free();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      write_box(half.address(i), acc + i * (kAll / 4), __nv_bfloat16{}, thread);
    }
    half.hand_over();
  }

  class Store {
   public:
    static constexpr int kBytes = kChunkBytes;  // the codes of A
    using Team = StoringTeam<kFp8Team<kStorers>>;

    __device__ Store(const Params& params, const Team& team, uint8_t* codes, uint64_t*)
        : params_(params), team_(team), codes_(codes) {}

    template <class Half>
    __device__ __forceinline__ void operator()(const RowTile& tile, int row, int rows, Half& half) {
      if (kFp8H && params_.h.data != nullptr) {
        half.await_ready();
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
          team_.template send<uint8_t>(half.box(plane), params_.h, tile.col, row, plane, rows);
        }
        if (team_.thread == 0) {
          ptx::tma_store_commit();
          ptx::tma_store_wait_read<0>();
        }
        half.release();
      }
      half.await_ready();
      if (team_.thread == 0) ptx::tma_store_wait_read<0>();  // of the last codes
      team_.sync();
      if (!kFp8H && params_.h.data != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          team_.template send<__nv_bfloat16>(half.box(i), params_.h, tile.col + i % 2 * kChunk, row,
                                             i / 2, rows);
        }
        if (team_.thread == 0) ptx::tma_store_commit();
      }
      activate_rows(tile.col, row, rows, half);
      ptx::fence_proxy_async();
      team_.sync();
      team_.template send<uint8_t>(codes_, params_.a, tile.col, row, 0, rows);
      if (team_.thread == 0) {
        ptx::tma_store_commit();
        ptx::tma_store_wait_read<1>();  // h
      }
      half.release();
    }

   private:
    // Eight lanes a row, each with 8 columns of either half of the block.
    template <class Half>
    __device__ __forceinline__ void activate_rows(int col, int first_row, int rows,
                                                  const Half& half) const {
      const int lane = threadIdx.x % 32, sub = lane % 8;
      const uint32_t codes = ptx::shared_address(codes_);
#pragma unroll 1
      for (int i = 0; i < Team::kWarpRows; i += 4) {
        const int r = team_.thread / 32 * Team::kWarpRows + i + lane / 8;
        const uint32_t at = Box<128>::offset(r, sub);
        float a[16];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const uint4 gate = ptx::load_shared_words(half.address(side) + at);
          const uint4 up = ptx::load_shared_words(half.address(2 + side) + at);
          activate_pair(gate.x, up.x, a + 8 * side);
          activate_pair(gate.y, up.y, a + 8 * side + 2);
          activate_pair(gate.z, up.z, a + 8 * side + 4);
          activate_pair(gate.w, up.w, a + 8 * side + 6);
        }
        const fp8::BlockScale scale = fp8::row_scale<8>(a, params_.rounding);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float* v = a + 8 * side;
          ptx::store_shared_words(codes + Box<128>::offset(r, 4 * side + sub / 2) + sub % 2 * 8,
                                  fp8::encode_four(v, scale.inverse),
                                  fp8::encode_four(v + 4, scale.inverse));
        }
        if (sub == 0 && r < rows) {
          params_.a_scale[static_cast<int64_t>(first_row + r) * params_.blocks + col / kFp8Block] =
              scale.scale;
        }
      }
    }

    __device__ static __forceinline__ void activate_pair(uint32_t gate, uint32_t up, float* a) {
      a[0] = gated<kActivation>(ptx::low_bf16(gate), ptx::low_bf16(up));
      a[1] = gated<kActivation>(ptx::high_bf16(gate), ptx::high_bf16(up));
    }

    const Params& params_;
    const Team team_;
    uint8_t* const codes_;
  };

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
};

}  // namespace dropless::cuda
