// Epilogue of expert_down_backward: from dA' = dy * down^T (in the accumulators), h and the routing
// weight p,
//   dh_gate = p dA' act'(h_gate) h_up,  dh_up = p dA' act(h_gate),  pA = p act(h_gate) h_up,
// and the sum of dA' * A over this tile's columns, the tile's share of p's gradient.
//
// 64 columns at a time, each warp turns its 16 rows of dA' around in shared memory, so that a lane
// holds 8 adjacent columns of a row: h is read and results are written 16 bytes at a time. The loop
// over these steps is not unrolled: copies of its body would not fit the instruction cache.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/tile/activation.cuh"

namespace dropless::cuda {

// bf16 [planes, M, cols] in device memory; bases and strides are multiples of 16 bytes.
struct RowMatrix {
  uint8_t* data;
  int64_t row_bytes;
  int64_t plane_bytes;
  int cols;
};

// Shared memory of one warpgroup: a warp has 16 rows of 64 fp32 of dA', and 16 rows of 128 bytes of
// each of gate and up, where a lane reads only what it has loaded itself.
class DswigluStaging {
 public:
  static constexpr int kWarpRows = 16;
  static constexpr int kWarpBytes = kWarpRows * (256 + 128 + 128);
  static constexpr int kBytes = 4 * kWarpBytes;

  __device__ DswigluStaging(uint8_t* buffers, int)
      : lane_(threadIdx.x % 32),
        first_row_(threadIdx.x % kWarpgroup / 32 * kWarpRows),
        products_(ptx::shared_address(buffers) + threadIdx.x % kWarpgroup / 32 * kWarpBytes) {}

  __device__ __forceinline__ int lane() const { return lane_; }
  // The warp's first row in a block of 64.
  __device__ __forceinline__ int first_row() const { return first_row_; }

  // Address of 16-byte unit `unit` (of 16) of row `row` of dA'. Swizzled so that neither the
  // fragments' 8-byte writes nor the rows' 16-byte reads meet in a bank.
  __device__ __forceinline__ uint32_t product(int row, int unit) const {
    return products_ + row * 256 + ((unit ^ (unit >> 3) ^ ((row & 3) << 1)) << 4);
  }
  // The 16 bytes of gate (matrix 0) or up (1) that this lane has in its i-th row.
  __device__ __forceinline__ uint32_t operand(int i, int matrix) const {
    return products_ + kWarpRows * 256 + matrix * kWarpRows * 128 + i * 512 + lane_ * 16;
  }
  __device__ __forceinline__ void finish() const {}

 private:
  int lane_;
  int first_row_;
  uint32_t products_;
};

template <ActivationKind kActivation>
class DswigluEpilogue {
 public:
  static constexpr int kMatrices = 1;
  using Staging = DswigluStaging;
  struct Params {
    RowMatrix h;                 // planes gate, up of [M, I]; read only
    RowMatrix dh;                // as h
    RowMatrix pa;                // [M, I]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int rows;                    // M
  };

  __device__ explicit DswigluEpilogue(const Params& params) : params_(params) {}

  template <int kRowTiles, int kAll>
  __device__ __forceinline__ void store(float (&acc)[kRowTiles][kAll], const RowTile& tile, int row,
                                        int rows, Staging& staging) const {
    constexpr int kCols = 2 * kAll, kChunks = kCols / kChunk;
    const int steps = (rows + kChunk - 1) / kChunk * kChunks;
    // This lane's rows of a block of 64 are first, first + 4, first + 8 and first + 12.
    const int first = staging.first_row() + staging.lane() / 8;
    const int lane_col = tile.col + staging.lane() % 8 * 8;
    float p[kLaneRows], sum[kLaneRows];
    const uint32_t h_row = static_cast<uint32_t>(params_.h.row_bytes);
    const uint32_t pa_row = static_cast<uint32_t>(params_.pa.row_bytes);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      load_h_row(i, params_.h.data + row * params_.h.row_bytes,
                 (first + 4 * i) * h_row + lane_col * 2,
                 first + 4 * i < rows && lane_col < params_.h.cols, staging);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int block = step / kChunks, chunk = step - block * kChunks;
      const int block_row = row + block * kChunk, block_rows = rows - block * kChunk;
      if (chunk == 0) load_weights(block_row, block_rows, first, p, sum);
      __syncwarp();  // the last step has read its products
#pragma unroll
      for (int s = 0; s < kRowTiles * kChunks; ++s) {
        if (step == s) write_products(acc[s / kChunks], s % kChunks * 32, staging);
      }
      __syncwarp();
      ptx::copy_async_wait();
      const int next = step + 1, next_block = next / kChunks;
      const int col = lane_col + chunk * kChunk;
      const int next_col = lane_col + (next - next_block * kChunks) * kChunk;
      const int next_rows = next_col < params_.h.cols ? rows - next_block * kChunk : 0;
      uint8_t* dh = params_.dh.data + block_row * params_.dh.row_bytes;
      uint8_t* pa = params_.pa.data + block_row * params_.pa.row_bytes;
      const uint8_t* next_h = params_.h.data + (row + next_block * kChunk) * params_.h.row_bytes;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const uint32_t r = first + 4 * i;
        const bool present = static_cast<int>(r) < block_rows && col < params_.h.cols;
        sum[i] += differentiate(i, dh + (r * h_row + col * 2), pa + (r * pa_row + col * 2), p[i],
                                present, staging);
        if (next < steps) {
          load_h_row(i, next_h, r * h_row + next_col * 2, static_cast<int>(r) < next_rows, staging);
        }
      }
      if (chunk == kChunks - 1) {
        store_sums(tile.col / kCols, block_row, block_rows, first, sum, staging.lane());
      }
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    const int64_t bytes = static_cast<int64_t>(params.pa.cols) * 2;
    zero_bytes(params.dh.data + row * params.dh.row_bytes, 2 * bytes, lane);
    zero_bytes(params.pa.data + row * params.pa.row_bytes, bytes, lane);
  }

 private:
  static constexpr int kLaneRows = 4;

  __device__ __forceinline__ void load_weights(int row, int rows, int first, float (&p)[kLaneRows],
                                               float (&sum)[kLaneRows]) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const bool present = first + 4 * i < rows;
      const int slot = present ? __ldg(params_.slot_of_row + row + first + 4 * i) : -1;
      p[i] = slot >= 0 ? __ldg(params_.weights + slot) : 0.0f;
      sum[i] = 0.0f;
    }
  }

  // Starts loading this lane's 8 columns of its i-th row of gate and up; `block` is where the block
  // of 64 rows starts. Within it 32 bits hold any offset.
  __device__ __forceinline__ void load_h_row(int i, const uint8_t* block, uint32_t offset,
                                             bool present, const Staging& staging) const {
    const uint8_t* from = present ? block + offset : params_.h.data;
    ptx::copy_async_16(staging.operand(i, 0), from, present);
    ptx::copy_async_16(staging.operand(i, 1), present ? from + params_.h.plane_bytes : from,
                       present);
  }

  // Registers from .. from + 31, a fragment of 64 columns, into rows.
  template <int kAll>
  __device__ __forceinline__ void write_products(const float (&acc)[kAll], int from,
                                                 const Staging& staging) const {
    const int lane = staging.lane();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared_v2(
            staging.product(lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8,
            acc[from + 4 * j + 2 * half], acc[from + 4 * j + 2 * half + 1]);
      }
    }
  }

  // This lane's 8 columns of its i-th row, results to dh and out_pa; returns their share of the
  // row's sum.
  __device__ __forceinline__ float differentiate(int i, uint8_t* dh, uint8_t* out_pa, float p,
                                                 bool present, const Staging& staging) const {
    const float4 gate = ptx::load_shared_16(staging.operand(i, 0));
    const float4 up = ptx::load_shared_16(staging.operand(i, 1));
    const int warp_row = staging.lane() / 8 + 4 * i, unit = staging.lane() % 8 * 2;
    const float4 low = ptx::load_shared_16(staging.product(warp_row, unit));
    const float4 high = ptx::load_shared_16(staging.product(warp_row, unit + 1));
    const float d[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const uint32_t g[4] = {__float_as_uint(gate.x), __float_as_uint(gate.y),
                           __float_as_uint(gate.z), __float_as_uint(gate.w)};
    const uint32_t u[4] = {__float_as_uint(up.x), __float_as_uint(up.y), __float_as_uint(up.z),
                           __float_as_uint(up.w)};
    uint32_t dg[4], du[4], pa[4];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float out_g[2], out_u[2], out_a[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float z = __uint_as_float(side == 0 ? g[k] << 16 : g[k] & 0xFFFF0000u);
        const float v = __uint_as_float(side == 0 ? u[k] << 16 : u[k] & 0xFFFF0000u);
        const ActivationValue activation = activate_with_derivative<kActivation>(z);
        const float product = activation.value * v, pd = p * d[2 * k + side];
        sum += d[2 * k + side] * product;
        out_g[side] = pd * activation.derivative * v;
        out_u[side] = pd * activation.value;
        out_a[side] = p * product;
      }
      dg[k] = ptx::pack_bf16(out_g[0], out_g[1]);
      du[k] = ptx::pack_bf16(out_u[0], out_u[1]);
      pa[k] = ptx::pack_bf16(out_a[0], out_a[1]);
    }
    if (present) {
      *reinterpret_cast<uint4*>(dh) = make_uint4(dg[0], dg[1], dg[2], dg[3]);
      *reinterpret_cast<uint4*>(dh + params_.dh.plane_bytes) =
          make_uint4(du[0], du[1], du[2], du[3]);
      *reinterpret_cast<uint4*>(out_pa) = make_uint4(pa[0], pa[1], pa[2], pa[3]);
    }
    return present ? sum : 0.0f;
  }

  // A row's sum lies in 8 lanes.
  __device__ __forceinline__ void store_sums(int col_tile, int row, int rows, int first,
                                             const float (&sum)[kLaneRows], int lane) const {
    float* sums = params_.row_sums + static_cast<int64_t>(col_tile) * params_.rows + row;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      float total = sum[i];
      for (int step = 1; step < 8; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (lane % 8 == 0 && first + 4 * i < rows) sums[first + 4 * i] = total;
    }
  }

  const Params& params_;
};

}  // namespace dropless::cuda
