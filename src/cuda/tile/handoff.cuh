// Results of the FP8 products on their way from the warpgroups that multiply to those that store:
// accumulators are written to shared memory, and the next tile's products go on while other warps
// do the rest of the epilogue.
#pragma once

#include "cuda/tile/result.cuh"

namespace dropless::cuda {

// One half of a tile's rows: 64 of them, which one warpgroup multiplies and one team stores.
template <int kBoxes_>  // of 64 rows x 128 bytes
class Handoff {
 public:
  static constexpr int kBoxes = kBoxes_;
  static constexpr int kBytes = kBoxes * kChunkBytes;
  static constexpr int kBarrierBytes = 2 * 8;

  __device__ Handoff(uint8_t* boxes /* 1024-byte aligned */, uint8_t* barriers)
      : boxes_(boxes), ready_(reinterpret_cast<uint64_t*>(barriers)), free_(ready_ + 1) {}

  // `storing_warps`: those that call release().
  __device__ void init(int storing_warps) const {
    ptx::mbarrier_init(ready_, kWarpgroup / 32);
    ptx::mbarrier_init(free_, storing_warps);
  }
  __device__ __forceinline__ uint8_t* box(int i) const { return boxes_ + i * kChunkBytes; }
  __device__ __forceinline__ uint32_t address(int i) const { return ptx::shared_address(box(i)); }

  // The multiplying warpgroup: before it writes, and after.
  __device__ __forceinline__ void await_free() const { ptx::mbarrier_wait(free_, phase_ ^ 1); }
  __device__ __forceinline__ void hand_over() {
    ptx::fence_proxy_async();
    arrive(ready_);
    phase_ ^= 1;
  }

  // The storing team, each of its warps: before it reads, and when nothing of it, nor the copy
  // engine on its behalf, will read any more.
  __device__ __forceinline__ void await_ready() const { ptx::mbarrier_wait(ready_, phase_); }
  __device__ __forceinline__ void release() {
    arrive(free_);
    phase_ ^= 1;
  }

 private:
  __device__ __forceinline__ static void arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  uint8_t* boxes_;
  uint64_t* ready_;
  uint64_t* free_;
  uint32_t phase_ = 0;
};

// Writes 64 rows x 64 columns to a box in bf16: registers first.. of a warpgroup's fragments.
__device__ __forceinline__ void write_box(uint32_t box, const float* value, __nv_bfloat16,
                                          int thread) {
  const uint32_t address = box + Box<128>::fragment_offset(thread);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float* v = value + 8 * pair;
    ptx::stmatrix_x4(address ^ (pair * 32), ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]),
                     ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
  }
}

// Writes 64 rows x 32 columns to a box in fp32.
__device__ __forceinline__ void write_box(uint32_t box, const float* value, float, int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int unit = 2 * j + lane % 4 / 2;
      ptx::store_shared_v2(box + Box<128>::offset(row, unit) + lane % 2 * 8,
                           value[4 * j + 2 * half], value[4 * j + 2 * half + 1]);
    }
  }
}

// Adds a bias [cols] to the fragments of 64 rows x kCols columns from `col` on.
template <int kCols>
__device__ __forceinline__ void add_bias(float* acc, const float* bias, int col, int cols,
                                         int thread) {
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    const int at = col + j * 8 + thread % 4 * 2;
    if (at >= cols) continue;
    const float2 b = __ldg(reinterpret_cast<const float2*>(bias + at));
    acc[4 * j] += b.x;
    acc[4 * j + 1] += b.y;
    acc[4 * j + 2] += b.x;
    acc[4 * j + 3] += b.y;
  }
}

// Who finishes a tile (kStorers of an epilogue): a warpgroup of its own (1), two warps of the
// loading warpgroup (0), or the warpgroups that multiply.
inline constexpr int kNoStorers = -1;

// Threads that store one half of a tile's rows.
template <int kStorers>
inline constexpr int kFp8Team = kStorers == 1 ? kWarpgroup / 2 : 32;

template <int kThreads_>
struct StoringTeam {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarpRows = kChunk / (kThreads / 32);  // rows of a warp

  int thread;   // of the team
  int barrier;  // a named one

  __device__ __forceinline__ void sync() const {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync(barrier, kThreads);
    }
  }

  // Stores a box to columns col.., rows row.. of which the first `rows` exist. The copy engine's
  // part is not committed.
  template <class Out>
  __device__ __forceinline__ void send(const uint8_t* box, const ResultMatrix& to, int col, int row,
                                       int plane, int rows) const {
    if (col >= to.cols) return;
    if (rows >= kChunk) {
      if (thread == 0) ptx::tma_store(&to.map, box, col, row, plane);
    } else {
      Box<128>::copy_rows<Out, kThreads>(ptx::shared_address(box), to, col, row, plane, rows,
                                         thread);
    }
  }
};

}  // namespace dropless::cuda
