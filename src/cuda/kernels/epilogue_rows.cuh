// What follows a product on the kernels for every GPU since sm_80: epilogues over a tile that lies
// as fp32 rows in shared memory. Sixteen lanes (eight where gate and up share the tile) have 8
// adjacent columns each of a row. T is the type of the operands.
#pragma once

#include "cuda/tile/block_math.cuh"
#include "cuda/tile/glu.cuh"
#include "cuda/tile/row_access.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

// The bias of 8 columns from `col` on, 0 where there is none.
__device__ __forceinline__ void load_bias(const float* bias, int expert, int cols, int col,
                                          float (&value)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool exists = bias != nullptr && col + i < cols;
    value[i] = exists ? __ldg(bias + static_cast<int64_t>(expert) * cols + col + i) : 0.0f;
  }
}

__device__ __forceinline__ float round_to(float, float x) { return x; }
__device__ __forceinline__ float round_to(__nv_bfloat16, float x) { return round_bf16(x); }

// out = product (+ bias), rounded to out's type; and, for experts without a gate, A = act(out).
template <class T>
struct StoreRows {
  static constexpr int kMatrices = 1;
  struct Params {
    RowArray out;       // [M, N]; data may be null if A is wanted
    RowArray a;         // [M, N] of T, data is null if not wanted: then out is of T too
    const float* bias;  // [E, N] or null
    int cols;           // N
    bool out_f32;       // float32, else bfloat16
    bool vector;
    ActivationOptions activation;
  };

  template <int kThreads>
  __device__ static void store(const Params& p, const StagedTile& staged, const RowTile& tile) {
    const int lane_col = threadIdx.x % 16 * 8, col = tile.col + lane_col, count = p.cols - col;
    if (count <= 0) return;
    float bias[8], value[8];
    load_bias(p.bias, tile.expert, p.cols, col, bias);
    for (int r = threadIdx.x / 16; r < tile.rows; r += kThreads / 16) {
      staged.load(r, lane_col, value);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] += bias[i];
      const int64_t row = tile.row + r;
      if (p.out.data != nullptr) store_out(p, row, col, count, value);
      if (p.a.data == nullptr) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        value[i] = glu<false, sizeof(T) == 4>(p.activation, round_to(T{}, value[i]), 0.0f).a;
      }
      store_8<T>(p.a.data + row * p.a.row_bytes + col * int64_t{sizeof(T)}, count, p.vector, value);
    }
  }

  __device__ static void zero_row(const Params& p, int row, int lane) {
    if (p.a.data != nullptr) {
      zero_elements<T>(p.a.data + row * p.a.row_bytes, p.cols, p.vector, lane);
    }
    if (p.out.data == nullptr) return;
    uint8_t* out = p.out.data + row * p.out.row_bytes;
    if (p.out_f32) {
      zero_elements<float>(out, p.cols, p.vector, lane);
    } else {
      zero_elements<__nv_bfloat16>(out, p.cols, p.vector, lane);
    }
  }

 private:
  __device__ __forceinline__ static void store_out(const Params& p, int64_t row, int col, int count,
                                                   const float (&value)[8]) {
    uint8_t* out = p.out.data + row * p.out.row_bytes;
    if (p.out_f32) {
      store_8<float>(out + col * int64_t{4}, count, p.vector, value);
    } else {
      store_8<__nv_bfloat16>(out + col * int64_t{2}, count, p.vector, value);
    }
  }
};

// h = (gate, up) + biases, and A from h as it is rounded to T, for gated experts. A tile holds
// columns of gate in its left half and the same columns of up in its right half.
template <class T>
struct SwigluRows {
  static constexpr int kMatrices = 2;
  struct Params {
    RowArray h;  // planes gate, up of [M, I]; data is null if h is not wanted
    RowArray a;  // [M, I]
    const float* gate_bias;
    const float* up_bias;
    int cols;  // I
    ActivationOptions activation;
    bool vector;
  };

  template <int kThreads>
  __device__ static void store(const Params& p, const StagedTile& staged, const RowTile& tile) {
    with_activation(p.activation, [&]<bool kPlainSilu>() {
      const int lane_col = threadIdx.x % 8 * 8, col = tile.col + lane_col, count = p.cols - col;
      const int64_t offset = static_cast<int64_t>(col) * sizeof(T);
      if (count <= 0) return;
      float gate_bias[8], up_bias[8], gate[8], up[8], a[8];
      load_bias(p.gate_bias, tile.expert, p.cols, col, gate_bias);
      load_bias(p.up_bias, tile.expert, p.cols, col, up_bias);
      for (int r = threadIdx.x / 8; r < tile.rows; r += kThreads / 8) {
        staged.load(r, lane_col, gate);
        staged.load(r, kBlockCols / 2 + lane_col, up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          gate[i] = round_to(T{}, gate[i] + gate_bias[i]);
          up[i] = round_to(T{}, up[i] + up_bias[i]);
          a[i] = glu<kPlainSilu, sizeof(T) == 4>(p.activation, gate[i], up[i]).a;
        }
        const int64_t row = tile.row + r;
        if (p.h.data != nullptr) {
          uint8_t* h = p.h.data + row * p.h.row_bytes + offset;
          store_8<T>(h, count, p.vector, gate);
          store_8<T>(h + p.h.plane_bytes, count, p.vector, up);
        }
        store_8<T>(p.a.data + row * p.a.row_bytes + offset, count, p.vector, a);
      }
    });
  }

  __device__ static void zero_row(const Params& p, int row, int lane) {
    zero_elements<T>(p.a.data + row * p.a.row_bytes, p.cols, p.vector, lane);
    if (p.h.data == nullptr) return;
    uint8_t* h = p.h.data + row * p.h.row_bytes;
    zero_elements<T>(h, p.cols, p.vector, lane);
    zero_elements<T>(h + p.h.plane_bytes, p.cols, p.vector, lane);
  }
};

// From dA' = dy * down^T, h and the routing weight p: dh = p dA' times A's gradient, pA, and the
// row's sum of dA' * A over this tile's columns.
template <class T>
struct DswigluRows {
  static constexpr int kMatrices = 1;
  struct Params {
    RowArray h;                  // planes gate, up of [M, I]; read only
    RowArray dh;                 // as h
    RowArray pa;                 // [M, I]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int slots;                   // T * K
    int rows;                    // M
    int cols;                    // I
    ActivationOptions activation;
    bool vector;
  };

  template <int kThreads>
  __device__ static void store(const Params& p, const StagedTile& staged, const RowTile& tile) {
    with_activation(p.activation, [&]<bool kPlainSilu>() {
      // All lanes of a warp stay in the loop, for the sums.
      for (int first = threadIdx.x / 32 * 2; first < tile.rows; first += kThreads / 16) {
        const int r = first + threadIdx.x % 32 / 16;
        differentiate<kPlainSilu>(p, staged, tile, r, threadIdx.x % 16 * 8);
      }
    });
  }

  __device__ static void zero_row(const Params& p, int row, int lane) {
    uint8_t* dh = p.dh.data + row * p.dh.row_bytes;
    zero_elements<T>(dh, p.cols, p.vector, lane);
    if (p.activation.gated) zero_elements<T>(dh + p.dh.plane_bytes, p.cols, p.vector, lane);
    zero_elements<T>(p.pa.data + row * p.pa.row_bytes, p.cols, p.vector, lane);
  }

 private:
  template <bool kPlainSilu>
  __device__ __forceinline__ static void differentiate(const Params& p, const StagedTile& staged,
                                                       const RowTile& tile, int r, int lane_col) {
    const int col = tile.col + lane_col;
    const int count = r < tile.rows ? p.cols - col : 0;
    const int64_t row = tile.row + r, offset = static_cast<int64_t>(col) * sizeof(T);
    const uint8_t* h = p.h.data + row * p.h.row_bytes + offset;
    float gate[8], up[8], d[8];
    load_8<T>(h, count, p.vector, gate);
    const bool gated = kPlainSilu || p.activation.gated;
    load_8<T>(h + p.h.plane_bytes, gated ? count : 0, p.vector, up);
    const int slot = r < tile.rows ? __ldg(p.slot_of_row + row) : -1;
    const float weight = slot >= 0 && slot < p.slots ? __ldg(p.weights + slot) : 0.0f;
    staged.load(r, lane_col, d);
    float pa[8], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const GluValue value = glu<kPlainSilu, sizeof(T) == 4>(p.activation, gate[i], up[i]);
      const float pd = weight * d[i];
      if (i < count) sum += d[i] * value.a;
      pa[i] = weight * value.a;
      gate[i] = pd * value.d_gate;
      up[i] = pd * value.d_up;
    }
    if (count > 0) {
      uint8_t* dh = p.dh.data + row * p.dh.row_bytes + offset;
      store_8<T>(dh, count, p.vector, gate);
      if (gated) store_8<T>(dh + p.dh.plane_bytes, count, p.vector, up);
      store_8<T>(p.pa.data + row * p.pa.row_bytes + offset, count, p.vector, pa);
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane_col == 0 && r < tile.rows) {
      p.row_sums[static_cast<int64_t>(tile.col / kBlockCols) * p.rows + row] = sum;
    }
  }
};

}  // namespace dropless::cuda
