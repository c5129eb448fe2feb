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

// [planes, rows, cols], rows row_bytes apart and planes plane_bytes apart. The map's boxes are
// those of the staging buffers that are stored to it.
struct alignas(128) ResultMatrix {
  CUtensorMap map;
  uint8_t* data;
  int64_t row_bytes;
  int64_t plane_bytes;
  int cols;
};

// A box in shared memory: 64 rows of kRowBytes (64 or 128), swizzled by as many.
template <int kRowBytes_>
struct Box {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kBytes = kChunk * kRowBytes;
  static constexpr int kUnits = kRowBytes / 16;  // of 16 bytes a row
  template <class Out>
  static constexpr int kCols = kRowBytes / static_cast<int>(sizeof(Out));

  // Offset of a row's 16-byte unit.
  __device__ static __forceinline__ uint32_t offset(int row, int unit) {
    return row * kRowBytes + ((unit ^ (kRowBytes == 128 ? row & 7 : row >> 1 & 3)) << 4);
  }
  // Offset that this lane gives to stmatrix_x4 and ldmatrix_x4 for columns 0..15 of the fragment of
  // bf16 that its warpgroup holds; columns 16n.. are at offset ^ 32n.
  __device__ static __forceinline__ uint32_t fragment_offset(int thread) {
    return offset(thread / 32 * 16 + thread % 16, thread % 32 / 16);
  }

  // kThreads threads: copies the box's first `rows` rows with ordinary stores.
  template <class Out, int kThreads = kWarpgroup>
  __device__ static __forceinline__ void copy_rows(uint32_t box, const ResultMatrix& to, int col,
                                                   int row, int plane, int rows, int thread) {
    const int unit = thread % kUnits;
    if (col + unit * (16 / static_cast<int>(sizeof(Out))) >= to.cols) return;
    uint8_t* out = to.data + plane * to.plane_bytes + row * to.row_bytes +
                   static_cast<int64_t>(col) * sizeof(Out) + unit * 16;
#pragma unroll 1
    for (int r = thread / kUnits; r < rows; r += kThreads / kUnits) {
      *reinterpret_cast<float4*>(out + r * to.row_bytes) =
          ptx::load_shared_16(box + offset(r, unit));
    }
  }
};

// One warpgroup's ring of staging buffers: one is filled while others are being stored.
template <int kRowBytes_, int kBuffers>
class ResultStaging {
 public:
  static constexpr int kRowBytes = kRowBytes_;
  using BoxType = Box<kRowBytes>;
  static constexpr int kBytes = kBuffers * BoxType::kBytes;
  static_assert(kBuffers >= 2);

  __device__ ResultStaging(uint8_t* buffers /* kBytes, 1024-byte aligned */, int warpgroup)
      : buffers_(buffers),
        thread_(threadIdx.x % kWarpgroup),
        barrier_(kWarpgroupBarrier + warpgroup) {}

  __device__ static void init(uint8_t*) {}
  __device__ __forceinline__ int thread() const { return thread_; }
  // Shared-memory address of the buffer that the next send() takes.
  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(buffer()); }

  // Writes 64 rows x (kRowBytes / 2) columns: value(i) is register i in wgmma's fragment order.
  template <class Value>
  __device__ __forceinline__ void write(__nv_bfloat16, Value value) {
    write_pairs([&](int i) { return ptx::pack_bf16(value(2 * i), value(2 * i + 1)); });
  }

  // The same from rounded pairs: pair(i) is registers 2 i and 2 i + 1.
  template <class Pair>
  __device__ __forceinline__ void write_pairs(Pair pair) {
    const uint32_t address = ptx::shared_address(buffer()) + BoxType::fragment_offset(thread_);
#pragma unroll
    for (int i = 0; i < kRowBytes / 32; ++i) {
      ptx::stmatrix_x4(address ^ (i * 32), pair(4 * i), pair(4 * i + 1), pair(4 * i + 2),
                       pair(4 * i + 3));
    }
  }

  // Writes 64 rows x (kRowBytes / 4) columns.
  template <class Value>
  __device__ __forceinline__ void write(float, Value value) {
    const int lane = thread_ % 32;
    const uint32_t base = ptx::shared_address(buffer());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_ / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < kRowBytes / 32; ++j) {
        const int unit = 2 * j + lane % 4 / 2;
        ptx::store_shared_v2(base + BoxType::offset(row, unit) + lane % 2 * 8,
                             value(4 * j + 2 * half), value(4 * j + 2 * half + 1));
      }
    }
  }

  // Sends the buffer to columns col.., rows row.. of which the first `rows` exist, and turns to the
  // next.
  template <class Out, bool kAdd = false>
  __device__ __forceinline__ void send(const ResultMatrix& to, int col, int row, int plane,
                                       int rows) {
    ptx::fence_proxy_async();
    // The next buffer's store must have left it before anybody writes there, after this barrier.
    if (thread_ == 0) ptx::tma_store_wait_read<kBuffers - 2>();
    ptx::named_barrier_sync(barrier_, kWarpgroup);
    if (rows < kChunk) {
      BoxType::template copy_rows<Out>(ptx::shared_address(buffer()), to, col, row, plane, rows,
                                       thread_);
    }
    if (thread_ == 0) {
      if (rows >= kChunk && col < to.cols) {
        if (kAdd) {
          ptx::tma_add(&to.map, buffer(), col, row, plane);
        } else {
          ptx::tma_store(&to.map, buffer(), col, row, plane);
        }
      }
      ptx::tma_store_commit();  // also if empty: the wait above counts groups
    }
    which_ = which_ + 1 == kBuffers ? 0 : which_ + 1;
  }

  // Before the block ends: its shared memory must outlive the stores that read it.
  __device__ __forceinline__ void finish() const {
    if (thread_ == 0) ptx::tma_store_wait_read<0>();
  }

 private:
  __device__ __forceinline__ uint8_t* buffer() const { return buffers_ + which_ * BoxType::kBytes; }

  uint8_t* buffers_;
  int which_ = 0;
  int thread_;
  int barrier_;
};

// Shared memory that a block may ask for, less room for barriers.
inline constexpr int kSharedLimit = 227 * 1024 - 1024;
// What a tile's stages leave to each of two warpgroups.
template <class Tile>
inline constexpr int kStagingLimit = (kSharedLimit - Tile::kStages * Tile::kStageBytes) / 2 / 1024 *
                                     1024;
// The staging buffers that fit, at most eight.
template <class Tile, int kRowBytes = 128>
using ResultStagingOf = ResultStaging<kRowBytes, (kStagingLimit<Tile> / Box<kRowBytes>::kBytes < 8
                                                      ? kStagingLimit<Tile> / Box<kRowBytes>::kBytes
                                                      : 8)>;

// Columns of a 128-byte row of results.
template <class Out>
inline constexpr int kResultCols = Box<128>::kCols<Out>;

}  // namespace dropless::cuda
