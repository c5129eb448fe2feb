// Epilogue of expert_down_backward in FP8: from dA' = dy * down^T (in the accumulators), h and the
// routing weight p,
//   dh_gate = p dA' act'(h_gate) h_up,  dh_up = p dA' act(h_gate),  pA = p act(h_gate) h_up
// in bf16, dh quantised from fp32 in blocks of one row and 128 columns, and the sum of dA' * A over
// this tile's columns, the tile's share of p's gradient.
//
// h arrives by TMA, is read in the layout of the accumulators, and its place in shared memory takes
// dh's bf16 values. The accumulators' registers, and as many again, take dh's fp32 values until
// their scales are known.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/fp8_rows.cuh"
#include "cuda/tile/fp8_tile.h"

namespace dropless::cuda {

// Shared memory of one warpgroup: h, then dh, of 64 rows (planes gate, up; two chunks of 64 columns
// a plane), and pA (two chunks), then the codes of dh (one 64 x 128 a plane).
class DswigluFp8Staging {
 public:
  static constexpr int kPlaneBytes = 2 * kChunkBytes;
  static constexpr int kBytes = 3 * kPlaneBytes;

  __device__ DswigluFp8Staging(uint8_t* buffers, int warpgroup, uint64_t* loaded)
      : buffers_(buffers),
        loaded_(loaded),
        thread_(threadIdx.x % kWarpgroup),
        barrier_(kWarpgroupBarrier + warpgroup) {}

  __device__ __forceinline__ int thread() const { return thread_; }
  __device__ __forceinline__ uint8_t* h(int plane) const { return buffers_ + plane * kPlaneBytes; }
  __device__ __forceinline__ uint8_t* results() const { return buffers_ + 2 * kPlaneBytes; }
  __device__ __forceinline__ uint64_t* loaded() const { return loaded_; }

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(barrier_, kWarpgroup); }
  // Waits for the warpgroup, and until every store has read its shared memory.
  __device__ __forceinline__ void sync_after_stores() const {
    ptx::fence_proxy_async();
    if (thread_ == 0) ptx::tma_store_wait_read<0>();
    sync();
  }
  __device__ __forceinline__ void await_h() {
    ptx::mbarrier_wait(loaded_, phase_);
    phase_ ^= 1;
  }
  __device__ __forceinline__ void finish() const {
    if (thread_ == 0) ptx::tma_store_wait_read<0>();
  }

 private:
  uint8_t* buffers_;
  uint64_t* loaded_;
  uint32_t phase_ = 0;
  int thread_;
  int barrier_;
};

template <ActivationKind kActivation>
class DswigluFp8Epilogue {
 public:
  static constexpr int kMatrices = 1;
  static constexpr bool kPrefetches = true;
  template <class Tile>
  using Staging = DswigluFp8Staging;
  struct Params {
    CUtensorMap h;               // planes gate, up of [M, I], boxes of 64 rows x 64 columns
    ResultMatrix dh;             // as h
    ResultMatrix dh_q;           // the same in e4m3; data is null if it is not wanted
    ResultMatrix pa;             // [M, I]
    float* dh_scale;             // [M, 2, ceil(I/128)]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int rows;                    // M
    int blocks;                  // ceil(I/128)
    ScaleRounding rounding;
  };

  __device__ explicit DswigluFp8Epilogue(const Params& params) : params_(params) {}

  // Starts loading what the tile's first 64 rows need.
  __device__ __forceinline__ void prefetch(const RowTile& tile, int row, int rows,
                                           DswigluFp8Staging& staging) {
    staging.sync_after_stores();
    load_h(tile.col, row, staging);
    load_weights(row, rows, staging.thread());
  }

  template <int kRowTiles, int kAll>
  __device__ __forceinline__ void store(float (&acc)[kRowTiles][kAll], const RowTile& tile, int row,
                                        int rows, DswigluFp8Staging& staging) {
    static_assert(kAll == fp8::kRowRegisters);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (rows > i * kChunk) {
        const int next = rows > (i + 1) * kChunk ? row + (i + 1) * kChunk : -1;
        store_block(acc[i], tile.col, row + i * kChunk, min(rows - i * kChunk, kChunk), next,
                    rows - (i + 1) * kChunk, staging);
      }
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    zero_bytes(params.dh.data + row * params.dh.row_bytes, params.dh.row_bytes, lane);
    zero_bytes(params.pa.data + row * params.pa.row_bytes, params.pa.row_bytes, lane);
    if (params.dh_q.data == nullptr) return;
    zero_bytes(params.dh_q.data + row * params.dh_q.row_bytes, params.dh_q.row_bytes, lane);
    fp8::store_unit_scales(params.dh_scale + static_cast<int64_t>(row) * 2 * params.blocks,
                           2 * params.blocks, lane);
  }

 private:
  __device__ __forceinline__ void load_h(int col, int row, const DswigluFp8Staging& staging) const {
    if (staging.thread() != 0) return;
    ptx::mbarrier_arrive_expect_tx(staging.loaded(), 2 * DswigluFp8Staging::kPlaneBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::tma_load(staging.h(i / 2) + i % 2 * kChunkBytes, &params_.h, staging.loaded(),
                    col + i % 2 * kChunk, row, i / 2);
    }
  }

  // p of this thread's rows r and r + 8; 0 where a row has no slot.
  __device__ __forceinline__ void load_weights(int row, int rows, int thread) {
    const int first = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + 8 * half;
      const int slot = r < rows ? __ldg(params_.slot_of_row + row + r) : -1;
      p_[half] = slot >= 0 ? __ldg(params_.weights + slot) : 0.0f;
    }
  }

  // 64 rows x 128 columns. `next` is the first row of the block after it, or -1.
  __device__ __forceinline__ void store_block(float (&gate)[fp8::kRowRegisters], int col, int row,
                                              int rows, int next, int next_rows,
                                              DswigluFp8Staging& staging) {
    float up[fp8::kRowRegisters];
    staging.await_h();
    staging.sync_after_stores();  // the codes' buffer takes pA
    differentiate(gate, up, col, row, rows, staging);
    ptx::fence_proxy_async();
    staging.sync();
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const int at = col + chunk * kChunk;
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        send<__nv_bfloat16>(staging.h(plane) + chunk * kChunkBytes, params_.dh, at, row, plane,
                            rows, staging.thread());
      }
      send<__nv_bfloat16>(staging.results() + chunk * kChunkBytes, params_.pa, at, row, 0, rows,
                          staging.thread());
    }
    staging.sync_after_stores();
    if (next >= 0) {
      load_h(col, next, staging);
      load_weights(next, next_rows, staging.thread());
    }
    if (params_.dh_q.data == nullptr) return;
    quantise(gate, 0, col, row, rows, staging);
    quantise(up, 1, col, row, rows, staging);
    ptx::fence_proxy_async();
    staging.sync();
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      send<uint8_t>(staging.results() + plane * kChunkBytes, params_.dh_q, col, row, plane, rows,
                    staging.thread());
    }
  }

  // gate: dA' -> dh_gate; up: dh_up. bf16 copies, and pA, go to shared memory.
  __device__ __forceinline__ void differentiate(float (&gate)[fp8::kRowRegisters],
                                                float (&up)[fp8::kRowRegisters], int col, int row,
                                                int rows, const DswigluFp8Staging& staging) const {
    const int thread = staging.thread(), lane = thread % 32;
    const int fragment_row = thread / 32 * 16 + lane % 16;
    const uint32_t row_offset = fragment_row * 128;
    const uint32_t h_gate = ptx::shared_address(staging.h(0)) + row_offset;
    const uint32_t h_up = ptx::shared_address(staging.h(1)) + row_offset;
    const uint32_t out_pa = ptx::shared_address(staging.results()) + row_offset;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < fp8::kRowRegisters / 8; ++group) {  // of 16 columns
      const int unit = group % 4 * 2 + lane / 16;
      const uint32_t offset = group / 4 * kChunkBytes + ((unit ^ (fragment_row & 7)) << 4);
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
        z[m] = ptx::pack_bf16(gate[group * 8 + m * 2], gate[group * 8 + m * 2 + 1]);
        v[m] = ptx::pack_bf16(up[group * 8 + m * 2], up[group * 8 + m * 2 + 1]);
      }
      ptx::stmatrix_x4(h_gate + offset, z[0], z[1], z[2], z[3]);
      ptx::stmatrix_x4(h_up + offset, v[0], v[1], v[2], v[3]);
      ptx::stmatrix_x4(out_pa + offset, pa[0], pa[1], pa[2], pa[3]);
    }
    float* sums = params_.row_sums + static_cast<int64_t>(col / kFp8Block) * params_.rows + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int r = thread / 32 * 16 + lane / 4 + 8 * half;
      if (lane % 4 == 0 && r < rows) sums[r] = total;
    }
  }

  __device__ __forceinline__ void quantise(const float (&value)[fp8::kRowRegisters], int plane,
                                           int col, int row, int rows,
                                           const DswigluFp8Staging& staging) const {
    const fp8::RowScales scales = fp8::row_scales(value, params_.rounding);
    fp8::write_codes(ptx::shared_address(staging.results() + plane * kChunkBytes), value, scales,
                     staging.thread());
    fp8::store_scales(params_.dh_scale + (static_cast<int64_t>(row) * 2 + plane) * params_.blocks +
                          col / kFp8Block,
                      2 * params_.blocks, scales, rows, staging.thread());
  }

  template <class Out>
  __device__ __forceinline__ void send(const uint8_t* buffer, const ResultMatrix& to, int col,
                                       int row, int plane, int rows, int thread) const {
    if (col >= to.cols) return;
    if (rows >= kChunk) {
      if (thread == 0) {
        ptx::tma_store(&to.map, buffer, col, row, plane);
        ptx::tma_store_commit();
      }
    } else {
      Box<128>::copy_rows<Out>(ptx::shared_address(buffer), to, col, row, plane, rows, thread);
    }
  }

  const Params& params_;
  float p_[2];
};

}  // namespace dropless::cuda
