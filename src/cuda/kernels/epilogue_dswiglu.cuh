// Epilogue of expert_down_backward: from dA' = dy * down^T (in the accumulators), h and the routing weight p,
//   dh_gate = p dA' act'(h_gate) h_up,  dh_up = p dA' act(h_gate),  pA = p act(h_gate) h_up,
// and the sum of dA' * A over this tile's columns, the tile's share of p's gradient.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/warp_rows.cuh"

namespace dropless::cuda {

template <ActivationKind kActivation>
class DswigluEpilogue {
 public:
  static constexpr int kMatrices = 1;
  using Staging = WarpStaging<3>;  // gate, up, pA
  struct Params {
    RowMatrix h;              // planes gate, up of [M, I]; read only
    RowMatrix dh;             // as h
    RowMatrix pa;             // [M, I]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int rows;                    // M
  };

  __device__ explicit DswigluEpilogue(const Params& params) : params_(params) {}

  template <int kCols>
  __device__ __forceinline__ void store(float (&acc)[kCols / 2], const RowTile& tile, int row,
                                        int rows, const Staging& staging) const {
    const int lane = staging.lane();
    const int first = staging.first_row() + lane / 4;  // this thread's rows: first and first + 8
    float p[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool present = first + half * 8 < rows;
      const int slot = present ? __ldg(params_.slot_of_row + row + first + half * 8) : -1;
      p[half] = slot >= 0 ? __ldg(params_.weights + slot) : 0.0f;
    }
#pragma unroll
    for (int chunk = 0; chunk < kCols / kChunk; ++chunk) {
      const int col = tile.col + chunk * kChunk;
      if (col >= params_.h.cols) break;
      load_h(col, row, rows, staging);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        differentiate(acc + chunk * 32 + pair * 8, pair, p, sum, staging);
      }
      staging.send(params_.dh, col, row, 0, rows, 0);
      staging.send(params_.dh, col, row, 1, rows, 1);
      staging.send(params_.pa, col, row, 0, rows, 2);
    }
    float* sums = params_.row_sums + static_cast<int64_t>(tile.col / kCols) * params_.rows + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if (lane % 4 == 0 && first + half * 8 < rows) sums[first + half * 8] = sum[half];
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    const int64_t bytes = static_cast<int64_t>(params.pa.cols) * 2;
    zero_bytes(params.dh.data + row * params.dh.row_bytes, 2 * bytes, lane);
    zero_bytes(params.pa.data + row * params.pa.row_bytes, bytes, lane);
  }

 private:
  // Brings 64 columns of h into buffers 0 (gate) and 1 (up).
  __device__ __forceinline__ void load_h(int col, int row, int rows,
                                         const Staging& staging) const {
    __syncwarp();  // the last chunk's results have left
    const int lane = staging.lane();
    const uint8_t* from = params_.h.data + static_cast<int64_t>(col) * 2 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i) {
      const int r = lane / 8 + 4 * i;
      const bool present =
          staging.first_row() + r < rows && col + lane % 8 * 8 < params_.h.cols;
      const int64_t offset = present ? (row + staging.first_row() + r) * params_.h.row_bytes : 0;
      const uint8_t* at = present ? from + offset : params_.h.data;
      ptx::copy_async_16(staging.unit_address(r, 0), at, present);
      ptx::copy_async_16(staging.unit_address(r, 1), present ? at + params_.h.plane_bytes : at,
                         present);
    }
    ptx::copy_async_wait();
    __syncwarp();
  }

  // 16 columns: reads gate and up, overwrites them with dh, and writes pA.
  __device__ __forceinline__ void differentiate(const float* acc, int pair, const float (&p)[2],
                                                float (&sum)[2], const Staging& staging) const {
    uint32_t gate[4], up[4], pa[4];
    const uint32_t gate_at = staging.fragment_address(pair, 0);
    const uint32_t up_at = staging.fragment_address(pair, 1);
    ptx::ldmatrix_x4(gate_at, gate[0], gate[1], gate[2], gate[3]);
    ptx::ldmatrix_x4(up_at, up[0], up[1], up[2], up[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // matrix i: rows of half i % 2
      const int half = i % 2;
      float g[2], u[2], a[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float z = __uint_as_float(side == 0 ? gate[i] << 16 : gate[i] & 0xFFFF0000u);
        const float v = __uint_as_float(side == 0 ? up[i] << 16 : up[i] & 0xFFFF0000u);
        const float d = acc[2 * i + side];
        const ActivationValue activation = activate_with_derivative<kActivation>(z);
        const float product = activation.value * v;
        sum[half] += d * product;
        g[side] = p[half] * d * activation.derivative * v;
        u[side] = p[half] * d * activation.value;
        a[side] = p[half] * product;
      }
      gate[i] = ptx::pack_bf16(g[0], g[1]);
      up[i] = ptx::pack_bf16(u[0], u[1]);
      pa[i] = ptx::pack_bf16(a[0], a[1]);
    }
    ptx::stmatrix_x4(gate_at, gate[0], gate[1], gate[2], gate[3]);
    ptx::stmatrix_x4(up_at, up[0], up[1], up[2], up[3]);
    ptx::stmatrix_x4(staging.fragment_address(pair, 2), pa[0], pa[1], pa[2], pa[3]);
  }

  const Params& params_;
};

}  // namespace dropless::cuda
