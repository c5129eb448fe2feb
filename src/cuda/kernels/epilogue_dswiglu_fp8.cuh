// Epilogue of expert_down_backward in FP8: from dA' = dy * down^T (in the accumulators), h and the
// routing weight p,
//   dh_gate = p dA' act'(h_gate) h_up,  dh_up = p dA' act(h_gate),  pA = p act(h_gate) h_up
// in bf16, dh quantised from fp32 in blocks of one row and 128 columns, and the sum of dA' * A over
// this tile's columns, the tile's share of p's gradient.
//
// The warpgroups that multiply do it themselves, with twice the registers that storing ones would
// have: measured faster, though no products run meanwhile. h arrives by TMA during the products, is
// read in the layout of the accumulators, and its place in shared memory takes dh's bf16 values.
// The accumulators' registers, and as many again, take dh's fp32 values until their scales are
// known.
//
// kColumns: for FP8 weight gradients, dh's bf16 values and pA are not stored but quantised in
// blocks of the tile's rows and one column (tile/token_block_store.cuh). Then both warpgroups,
// which share the columns, finish a tile together.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/fp8_rows.cuh"
#include "cuda/tile/fp8_tile.h"
#include "cuda/tile/handoff.cuh"
#include "cuda/tile/token_block_store.cuh"

namespace dropless::cuda {

template <ActivationKind kActivation, bool kColumns>
class DswigluFp8Epilogue {
 public:
  static constexpr int kMatrices = 1;
  static constexpr int kStorers = kNoStorers;
  static constexpr bool kTogether = kColumns;
  // Of a warpgroup: h, then dh, of 64 rows (planes gate, up; two chunks of 64 columns a plane), and
  // pA (two chunks), then the codes of dh (one 64 x 128 a plane).
  static constexpr int kWarpgroupBoxes = 6;
  template <class Tile>
  static constexpr int kBoxes = kWarpgroupBoxes;
  struct Params {
    CUtensorMap h;               // planes gate, up of [M, I], boxes of 64 rows x 64 columns
    ResultMatrix dh;             // as h
    ResultMatrix dh_q;           // the same in e4m3; data is null if it is not wanted
    ResultMatrix pa;             // [M, I]
    float* dh_scale;             // [M, 2, ceil(I/128)]
    BlockedResult dh_columns;    // kColumns only, in place of dh
    BlockedResult pa_columns;    // kColumns only, in place of pa
    const int32_t* offsets;      // [E+1]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int rows;                    // M
    int blocks;                  // ceil(I/128)
    ScaleRounding rounding;
  };

  // Of one warpgroup.
  class Finish {
   public:
    __device__ Finish(const Params& params, uint8_t* boxes, uint64_t* loaded, int warpgroup)
        : params_(params),
          boxes_(boxes),
          loaded_(loaded),
          thread_(threadIdx.x % kWarpgroup),
          barrier_(kWarpgroupBarrier + warpgroup),
          columns_(boxes - warpgroup * kWarpgroupBoxes * kChunkBytes, kWarpgroupBoxes, warpgroup) {}

    // Before the products: starts loading what the 64 rows need.
    __device__ __forceinline__ void prefetch(const RowTile& tile, int row, int rows) {
      sync_after_stores();
      load_h(tile.col, row);
      load_weights(row, rows);
    }

    // 64 rows x 128 columns, after the products.
    __device__ __forceinline__ void operator()(float (&gate)[fp8::kRowRegisters],
                                               const RowTile& tile, int row, int rows) {
      float up[fp8::kRowRegisters];
      ptx::mbarrier_wait(loaded_, phase_);
      phase_ ^= 1;
      sync_after_stores();  // the codes' boxes take pA
      differentiate(gate, up, tile.col, row, rows);
      if constexpr (kColumns) {
        send_codes(gate, up, tile.col, row, rows);
        send_columns(gate, up, tile, rows);
        return;
      }
      ptx::fence_proxy_async();
      sync();
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const int at = tile.col + chunk * kChunk;
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
          send<__nv_bfloat16>(h(plane) + chunk * kChunkBytes, params_.dh, at, row, plane, rows);
        }
        send<__nv_bfloat16>(results() + chunk * kChunkBytes, params_.pa, at, row, 0, rows);
      }
      if (params_.dh_q.data == nullptr) return;
      sync_after_stores();
      send_codes(gate, up, tile.col, row, rows);
    }

    // kColumns: this half of the tile has none, the other half has.
    __device__ __forceinline__ void without_rows(const RowTile& tile, int) {
      sync_after_stores();
      columns_.add_nothing();
      const int64_t block = block_of(tile);
      columns_.scale(params_.dh_columns, params_.pa_columns, block, tile.col, params_.rounding);
      columns_.write_nothing();
      columns_.send(params_.dh_columns, params_.pa_columns, block, tile.col);
    }

    // Shared memory must outlive the stores that read it.
    __device__ __forceinline__ void finish() const {
      if (thread_ == 0) ptx::tma_store_wait_read<0>();
    }

   private:
    static constexpr int kPlaneBytes = 2 * kChunkBytes;

    __device__ __forceinline__ uint8_t* h(int plane) const { return boxes_ + plane * kPlaneBytes; }
    __device__ __forceinline__ uint8_t* results() const { return boxes_ + 2 * kPlaneBytes; }
    __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(barrier_, kWarpgroup); }
    // Waits for the warpgroup, and until every store has read its shared memory.
    __device__ __forceinline__ void sync_after_stores() const {
      ptx::fence_proxy_async();
      finish();
      sync();
    }

    // dh in blocks of rows.
    __device__ __forceinline__ void send_codes(const float (&gate)[fp8::kRowRegisters],
                                               const float (&up)[fp8::kRowRegisters], int col,
                                               int row, int rows) const {
      quantise(gate, 0, col, row, rows);
      quantise(up, 1, col, row, rows);
      ptx::fence_proxy_async();
      sync();
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        send<uint8_t>(results() + plane * kChunkBytes, params_.dh_q, col, row, plane, rows);
      }
    }

    // The tile's block of its expert's rows.
    __device__ __forceinline__ int64_t block_of(const RowTile& tile) const {
      const int first = min(max(__ldg(params_.offsets + tile.expert), 0), params_.rows);
      return first_token_block(first, tile.expert) + (tile.row - first) / kFp8Block;
    }

    // dh and pA in blocks of columns, of their values in bf16.
    __device__ __forceinline__ void send_columns(const float (&gate)[fp8::kRowRegisters],
                                                 const float (&up)[fp8::kRowRegisters],
                                                 const RowTile& tile, int rows) const {
      TokenBlockStore::Fragment dh[2], pa;
      const int first = thread_ / 32 * 16 + thread_ % 32 / 4;
      const uint32_t kept_pa = ptx::shared_address(h(0));
#pragma unroll
      for (int group = 0; group < TokenBlockStore::kPairs / 4; ++group) {
        uint32_t words[4];
        ptx::ldmatrix_x4(kept_pa + fragment_offset(group), words);
#pragma unroll
        for (int m = 0; m < 4; ++m) pa[group * 4 + m] = words[m];
      }
#pragma unroll
      for (int i = 0; i < TokenBlockStore::kPairs; ++i) {
        const uint32_t present = first + i % 2 * 8 < rows ? ~0u : 0;
        dh[0][i] = ptx::pack_bf16(gate[2 * i], gate[2 * i + 1]) & present;
        dh[1][i] = ptx::pack_bf16(up[2 * i], up[2 * i + 1]) & present;
        pa[i] &= present;
      }
      columns_.add(0, dh[0]);
      columns_.add(1, dh[1]);
      columns_.add(2, pa);
      const int64_t block = block_of(tile);
      columns_.scale(params_.dh_columns, params_.pa_columns, block, tile.col, params_.rounding);
      columns_.write(0, dh[0]);
      columns_.write(1, dh[1]);
      columns_.write(2, pa);
      columns_.send(params_.dh_columns, params_.pa_columns, block, tile.col);
    }

    __device__ __forceinline__ void load_h(int col, int row) const {
      if (thread_ != 0) return;
      ptx::mbarrier_arrive_expect_tx(loaded_, 2 * kPlaneBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::tma_load(h(i / 2) + i % 2 * kChunkBytes, &params_.h, loaded_, col + i % 2 * kChunk,
                      row, i / 2);
      }
    }

    // p of this thread's rows r and r + 8; 0 where a row has no slot.
    __device__ __forceinline__ void load_weights(int row, int rows) {
      const int first = thread_ / 32 * 16 + thread_ % 32 / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = first + 8 * half;
        const int slot = r < rows ? __ldg(params_.slot_of_row + row + r) : -1;
        p_[half] = slot >= 0 ? __ldg(params_.weights + slot) : 0.0f;
      }
    }

    // Of this lane's 16 bytes of the 16 columns `group` in a plane.
    __device__ __forceinline__ uint32_t fragment_offset(int group) const {
      const int lane = thread_ % 32, row = thread_ / 32 * 16 + lane % 16;
      const int unit = group % 4 * 2 + lane / 16;
      return group / 4 * kChunkBytes + row * 128 + ((unit ^ (row & 7)) << 4);
    }

    // gate: dA' -> dh_gate; up: dh_up. bf16 copies, and pA, go to shared memory; if kColumns, pA
    // alone, in h_gate's place.
    __device__ __forceinline__ void differentiate(float (&gate)[fp8::kRowRegisters],
                                                  float (&up)[fp8::kRowRegisters], int col, int row,
                                                  int rows) const {
      const int lane = thread_ % 32;
      const uint32_t h_gate = ptx::shared_address(h(0));
      const uint32_t h_up = ptx::shared_address(h(1));
      const uint32_t out_pa = kColumns ? h_gate : ptx::shared_address(results());
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int group = 0; group < fp8::kRowRegisters / 8; ++group) {  // of 16 columns
        const uint32_t offset = fragment_offset(group);
        uint32_t z[4], v[4], pa[4];
        ptx::ldmatrix_x4(h_gate + offset, z);
        ptx::ldmatrix_x4(h_up + offset, v);
#pragma unroll
        for (int m = 0; m < 4; ++m) {  // 8 x 8 matrices; odd ones are rows + 8
          const float p = p_[m % 2];
          float a[2];
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int i = group * 8 + m * 2 + side;
            const float zi = __uint_as_float(side == 0 ? z[m] << 16 : z[m] & 0xFFFF0000u);
            const float vi = __uint_as_float(side == 0 ? v[m] << 16 : v[m] & 0xFFFF0000u);
            const ActivationValue activation = activate_with_derivative<kActivation>(zi);
            const float product = activation.value * vi, pd = p * gate[i];
            sum[m % 2] += gate[i] * product;
            gate[i] = pd * activation.derivative * vi;
            up[i] = pd * activation.value;
            a[side] = p * product;
          }
          pa[m] = ptx::pack_bf16(a[0], a[1]);
          if constexpr (kColumns) continue;
          z[m] = ptx::pack_bf16(gate[group * 8 + m * 2], gate[group * 8 + m * 2 + 1]);
          v[m] = ptx::pack_bf16(up[group * 8 + m * 2], up[group * 8 + m * 2 + 1]);
        }
        if constexpr (!kColumns) {
          ptx::stmatrix_x4(h_gate + offset, z[0], z[1], z[2], z[3]);
          ptx::stmatrix_x4(h_up + offset, v[0], v[1], v[2], v[3]);
        }
        ptx::stmatrix_x4(out_pa + offset, pa[0], pa[1], pa[2], pa[3]);
      }
      float* sums = params_.row_sums + static_cast<int64_t>(col / kFp8Block) * params_.rows + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int r = thread_ / 32 * 16 + lane / 4 + 8 * half;
        if (lane % 4 == 0 && r < rows) sums[r] = total;
      }
    }

    __device__ __forceinline__ void quantise(const float (&value)[fp8::kRowRegisters], int plane,
                                             int col, int row, int rows) const {
      const fp8::RowScales scales = fp8::row_scales(value, params_.rounding);
      fp8::write_codes(ptx::shared_address(results() + plane * kChunkBytes), value, scales,
                       thread_);
      fp8::store_scales(params_.dh_scale +
                            (static_cast<int64_t>(row) * 2 + plane) * params_.blocks +
                            col / kFp8Block,
                        2 * params_.blocks, scales, rows, thread_);
    }

    template <class Out>
    __device__ __forceinline__ void send(const uint8_t* buffer, const ResultMatrix& to, int col,
                                         int row, int plane, int rows) const {
      if (col >= to.cols) return;
      if (rows >= kChunk) {
        if (thread_ == 0) {
          ptx::tma_store(&to.map, buffer, col, row, plane);
          ptx::tma_store_commit();
        }
      } else {
        Box<128>::copy_rows<Out>(ptx::shared_address(buffer), to, col, row, plane, rows, thread_);
      }
    }

    const Params& params_;
    uint8_t* const boxes_;
    uint64_t* const loaded_;
    const int thread_;
    const int barrier_;
    const TokenBlockStore columns_;
    uint32_t phase_ = 0;
    float p_[2];
  };

  __device__ static void zero_row(const Params& params, int row, int lane) {
    if constexpr (!kColumns) {
      zero_bytes(params.dh.data + row * params.dh.row_bytes, params.dh.row_bytes, lane);
      zero_bytes(params.pa.data + row * params.pa.row_bytes, params.pa.row_bytes, lane);
    }
    if (params.dh_q.data == nullptr) return;
    zero_bytes(params.dh_q.data + row * params.dh_q.row_bytes, params.dh_q.row_bytes, lane);
    fp8::store_unit_scales(params.dh_scale + static_cast<int64_t>(row) * 2 * params.blocks,
                           2 * params.blocks, lane);
  }
};

}  // namespace dropless::cuda
