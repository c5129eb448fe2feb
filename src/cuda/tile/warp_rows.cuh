// Rows that an epilogue reads and writes a warp at a time: each warp turns its 16 rows of a block of 64 around in
// 2 KiB buffers of its own, between fragments and whole 128-byte rows, and waits for no other warp.
#pragma once

#include <cstdint>

#include "cuda/ptx/matrix_move.cuh"
#include "cuda/tile/operand.cuh"

namespace dropless::cuda {

// Rows of a warp in a block of 64 rows, and its buffer: 16 rows of 128 bytes, 16-byte units swizzled by row.
inline constexpr int kWarpRows = 16;
inline constexpr int kWarpBufferBytes = kWarpRows * 128;

// bf16 [planes, rows, cols] in device memory; bases and strides are multiples of 16 bytes.
struct RowMatrix {
  uint8_t* data;
  int64_t row_bytes;
  int64_t plane_bytes;
  int cols;
};

template <int kBuffers>
class WarpStaging {
 public:
  static constexpr int kBytes = 4 * kBuffers * kWarpBufferBytes;  // of a warpgroup

  __device__ WarpStaging(uint8_t* buffers /* the warpgroup's */, int)
      : buffer_(ptx::shared_address(buffers) +
                threadIdx.x % kWarpgroup / 32 * kBuffers * kWarpBufferBytes),
        lane_(threadIdx.x % 32),
        first_row_(threadIdx.x % kWarpgroup / 32 * kWarpRows) {}

  __device__ __forceinline__ int lane() const { return lane_; }
  // The warp's first row in a block of 64.
  __device__ __forceinline__ int first_row() const { return first_row_; }

  // Address for stmatrix and ldmatrix of columns 16 * pair .. + 15 of buffer `index`.
  __device__ __forceinline__ uint32_t fragment_address(int pair, int index = 0) const {
    const int row = lane_ % 16, unit = 2 * pair + lane_ / 16;
    return buffer_ + index * kWarpBufferBytes + row * 128 + ((unit ^ (row & 7)) << 4);
  }

  // Address of 16-byte unit lane % 8 of row `row`.
  __device__ __forceinline__ uint32_t unit_address(int row, int index = 0) const {
    return buffer_ + index * kWarpBufferBytes + row * 128 + ((lane_ % 8 ^ (row & 7)) << 4);
  }

  // Stores buffer `index` to columns col.. of a block whose first row is `row` and which has `rows` rows.
  __device__ __forceinline__ void send(const RowMatrix& to, int col, int row, int plane, int rows,
                                       int index = 0) const {
    __syncwarp();
    const int unit = lane_ % 8;
    if (col + unit * 8 >= to.cols) return;
    uint8_t* out = to.data + plane * to.plane_bytes + (row + first_row_) * to.row_bytes +
                   static_cast<int64_t>(col) * 2 + unit * 16;
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i) {
      const int r = lane_ / 8 + 4 * i;
      if (first_row_ + r >= rows) break;
      *reinterpret_cast<float4*>(out + r * to.row_bytes) =
          ptx::load_shared_16(unit_address(r, index));
    }
  }

  __device__ __forceinline__ void finish() const {}

 private:
  uint32_t buffer_;
  int lane_;
  int first_row_;
};

}  // namespace dropless::cuda
