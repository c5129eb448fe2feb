// Results of a tile on their way out: accumulator fragments -> swizzled shared memory -> device
// memory, by TMA where a whole 64-row block belongs to the group and by predicated 16-byte stores
// where it does not.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/operand.cuh"

namespace dropless::cuda {

// [planes, rows, cols], rows row_bytes apart and planes plane_bytes apart. The map's box is 64 rows
// of 128 bytes, swizzled by 128.
struct alignas(128) ResultMatrix {
  CUtensorMap map;
  uint8_t* data;
  int64_t row_bytes;
  int64_t plane_bytes;
  int cols;
};

// Columns of a 128-byte row of results.
template <class Out>
inline constexpr int kResultCols = 128 / static_cast<int>(sizeof(Out));

// One warpgroup's pair of staging buffers: one is filled while the other is being stored.
class ResultStaging {
 public:
  static constexpr int kBytes = 2 * kChunkBytes;

  __device__ ResultStaging(uint8_t* buffers /* kBytes, 1024-byte aligned */, int warpgroup)
      : buffers_(buffers),
        thread_(threadIdx.x % kWarpgroup),
        barrier_(kWarpgroupBarrier + warpgroup) {}

  __device__ __forceinline__ int thread() const { return thread_; }

  // Writes 64 rows x 64 columns: value(i) is register i of 32, in wgmma's fragment order.
  template <class Value>
  __device__ __forceinline__ void write(__nv_bfloat16, Value value) {
    const int lane = thread_ % 32;
    const int row = thread_ / 32 * 16 + lane % 16;
    const uint32_t row_address = ptx::shared_address(buffer()) + row * 128;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int unit = 2 * pair + lane / 16;  // of 16 bytes
      ptx::stmatrix_x4(row_address + ((unit ^ (row & 7)) << 4),
                       ptx::pack_bf16(value(8 * pair), value(8 * pair + 1)),
                       ptx::pack_bf16(value(8 * pair + 2), value(8 * pair + 3)),
                       ptx::pack_bf16(value(8 * pair + 4), value(8 * pair + 5)),
                       ptx::pack_bf16(value(8 * pair + 6), value(8 * pair + 7)));
    }
  }

  // Writes 64 rows x 32 columns: value(i) is register i of 16.
  template <class Value>
  __device__ __forceinline__ void write(float, Value value) {
    const int lane = thread_ % 32;
    const uint32_t base = ptx::shared_address(buffer());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_ / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int unit = 2 * j + lane % 4 / 2;
        ptx::store_shared_v2(base + row * 128 + ((unit ^ (row & 7)) << 4) + lane % 2 * 8,
                             value(4 * j + 2 * half), value(4 * j + 2 * half + 1));
      }
    }
  }

  // Sends the buffer to columns col.., rows row.. of which the first `rows` exist, and turns to the
  // other.
  template <class Out, bool kAdd = false>
  __device__ __forceinline__ void send(const ResultMatrix& to, int col, int row, int plane,
                                       int rows) {
    ptx::fence_proxy_async();
    // The other buffer's store must have left it before anybody writes there, after this barrier.
    if (thread_ == 0) ptx::tma_store_wait_read<0>();
    ptx::named_barrier_sync(barrier_, kWarpgroup);
    if (rows >= kChunk) {
      if (thread_ == 0 && col < to.cols) {
        if (kAdd) {
          ptx::tma_add(&to.map, buffer(), col, row, plane);
        } else {
          ptx::tma_store(&to.map, buffer(), col, row, plane);
        }
        ptx::tma_store_commit();
      }
    } else {
      copy_rows<Out>(to, col, row, plane, rows);
    }
    which_ ^= 1;
  }

  // Before the block ends: its shared memory must outlive the stores that read it.
  __device__ __forceinline__ void finish() const {
    if (thread_ == 0) ptx::tma_store_wait_read<0>();
  }

 private:
  __device__ __forceinline__ uint8_t* buffer() const { return buffers_ + which_ * kChunkBytes; }

  template <class Out>
  __device__ __forceinline__ void copy_rows(const ResultMatrix& to, int col, int row, int plane,
                                            int rows) const {
    const int unit = thread_ % 8;
    if (col + unit * (16 / static_cast<int>(sizeof(Out))) >= to.cols) return;
    uint8_t* out = to.data + plane * to.plane_bytes + row * to.row_bytes +
                   static_cast<int64_t>(col) * sizeof(Out) + unit * 16;
    const uint32_t base = ptx::shared_address(buffer());
    for (int r = thread_ / 8; r < rows; r += kWarpgroup / 8) {
      *reinterpret_cast<float4*>(out + r * to.row_bytes) =
          ptx::load_shared_16(base + r * 128 + ((unit ^ (r & 7)) << 4));
    }
  }

  uint8_t* buffers_;
  int which_ = 0;
  int thread_;
  int barrier_;
};

}  // namespace dropless::cuda
