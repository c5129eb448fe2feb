// Operand tiles on their way from device memory to shared memory, for the kernels that run on every
// GPU since sm_80: cp.async where addresses allow it, element by element where they do not.
#pragma once

#include <cstdint>

#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/gemm_tile.h"

namespace dropless::cuda {

// Bytes of contraction in a stage of one row (column) of an operand.
inline constexpr int kStageRowBytes = 128;

// How a stage of kWidth rows (columns) of an operand lies in shared memory, in chunks of 16 bytes:
//   K-major:  kWidth rows of 128 bytes of contraction elements;
//   MN-major: 128 bytes' worth of contraction steps, each of kWidth columns.
// The place of a chunk in its row is its number XOR the row's last three bits, so that neither
// copies nor the fragments' loads meet in a bank. Stages are multiples of 128 bytes: an address
// (stage + row * pitch + chunk * 16) takes the XOR as a whole.
template <class T, Major kMajor, int kWidth>
struct StageLayout {
  static constexpr Major kMajorOf = kMajor;
  static constexpr int kChunkElements = 16 / static_cast<int>(sizeof(T));
  static constexpr int kRowChunks =
      kMajor == Major::kK ? kStageRowBytes / 16 : kWidth / kChunkElements;
  static constexpr int kPitch = kRowChunks * 16;
  static constexpr int kRows = kWidth * kStageRowBytes / kPitch;

  __device__ static __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ (row & 7)) << 4);
  }
};

// The same address, but opaque: the compiler then keeps it in registers, where it would compute it
// anew at each use, and base + row * bytes is one instruction.
__device__ __forceinline__ const uint8_t* opaque(const uint8_t* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// The part of a stage of one operand that one thread copies: kCount chunks, one column of chunks of
// the stage, of rows row(0), row(1), ...
template <class T, Major kMajor, int kWidth, int kThreads>
class StageCopy {
 public:
  using Layout = StageLayout<T, kMajor, kWidth>;
  static constexpr int kRowStep = kThreads / Layout::kRowChunks;
  static constexpr int kCount = Layout::kRows / kRowStep;

  __device__ StageCopy()
      : first_row_(threadIdx.x / Layout::kRowChunks), chunk_(threadIdx.x % Layout::kRowChunks) {}

  __device__ __forceinline__ int row(int i) const { return first_row_ + i * kRowStep; }
  // The first element of this thread's chunks in a row of the stage.
  __device__ __forceinline__ int element() const { return chunk_ * Layout::kChunkElements; }

  // Where row r of a stage stands in a table of rows, and the rows that this thread copies: as they
  // are read, kCount adjacent entries.
  __device__ __forceinline__ static int place(int r) {
    return r % kRowStep * kCount + r / kRowStep;
  }
  __device__ __forceinline__ void rows(uint32_t table, int (&rows)[kCount]) const {
    static_assert(kCount % 4 == 0);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int4 four = ptx::load_shared_int4(table + (first_row_ * kCount + i) * 4);
      rows[i] = four.x;
      rows[i + 1] = four.y;
      rows[i + 2] = four.z;
      rows[i + 3] = four.w;
    }
  }

  // Copies chunk i to `stage`, for aligned addresses; locate(i, from) says from where, and whether
  // it exists: else it is zeros.
  template <class Locate>
  __device__ __forceinline__ void copy_some(uint32_t stage, const Locate& locate) const {
    const uint32_t to = stage + Layout::offset(first_row_, chunk_);
#pragma unroll 1  // a branch; unrolled, predicates would cost the stages where all exist as much
    for (int i = 0; i < kCount; ++i) {
      const uint8_t* from;
      const bool exists = locate(i, from);
      ptx::copy_async_16(to + i * (kRowStep * Layout::kPitch), from, exists);
    }
  }
  // The same where all exist: chunk i from base + i * step_bytes, and, counted anew, the chunks of
  // the stage's upper half from `upper` on.
  __device__ __forceinline__ void copy_all(uint32_t stage, const uint8_t* base,
                                           const uint8_t* upper, uint32_t step_bytes) const {
    const uint32_t to = stage + Layout::offset(first_row_, chunk_);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint8_t* from = i < kCount / 2 ? base + uint64_t{step_bytes} * i
                                           : upper + uint64_t{step_bytes} * (i - kCount / 2);
      ptx::copy_async_16(to + i * (kRowStep * Layout::kPitch), from, true);
    }
  }
  // Copies chunk i to `stage` from base + rows[i] * row_bytes, for aligned addresses; zeros where
  // that is negative or `exists` is false.
  __device__ __forceinline__ void copy_rows(uint32_t stage, const uint8_t* base, uint32_t row_bytes,
                                            const int (&rows)[kCount], bool exists) const {
    const uint32_t to = stage + Layout::offset(first_row_, chunk_);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::copy_async_16(to + i * (kRowStep * Layout::kPitch),
                         base + uint64_t{static_cast<uint32_t>(rows[i])} * row_bytes,
                         exists && rows[i] >= 0);
    }
  }

  // Copies to `stage`: chunk i comes from base[0] (base[1] in the stage's upper half of rows)
  // + rows[i] * row_bytes + element() elements, where `count` of its elements exist, and none if
  // rows[i] is negative. What does not exist becomes 0. `access` is the bytes that every address is
  // a multiple of: 16, 4, or those of T.
  __device__ __forceinline__ void copy(uint32_t stage, const uint8_t* const (&base)[2],
                                       uint32_t row_bytes, const int (&rows)[kCount], int count,
                                       int access) const {
    // Rows kRowStep apart have the same swizzle.
    static_assert(kRowStep % 8 == 0);
    const uint32_t to = stage + Layout::offset(first_row_, chunk_);
    if (access == 16) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        ptx::copy_async_16(to + i * (kRowStep * Layout::kPitch),
                           address(base, i, rows[i], row_bytes), rows[i] >= 0 && count > 0);
      }
    } else if (sizeof(T) == 4 || access == 4) {
      constexpr int kWord = 4 / static_cast<int>(sizeof(T));  // elements
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint8_t* chunk = address(base, i, rows[i], row_bytes);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          ptx::copy_async_4(to + i * (kRowStep * Layout::kPitch) + word * 4, chunk + word * 4,
                            rows[i] >= 0 && word * kWord < count);
        }
      }
    } else {
      copy_elements(to, base, row_bytes, rows, count);
    }
  }

 private:
  // A row that does not exist gives some address, which is not read.
  __device__ __forceinline__ const uint8_t* address(const uint8_t* const (&base)[2], int i, int row,
                                                    uint32_t row_bytes) const {
    return base[2 * i / kCount] + chunk_ * 16 +
           static_cast<uint64_t>(static_cast<uint32_t>(row)) * row_bytes;
  }

  // 16-bit elements at odd places: no asynchronous copy is that small. Four rows at a time, so that
  // their loads are in flight together.
  __device__ __forceinline__ void copy_elements(uint32_t to, const uint8_t* const (&base)[2],
                                                uint32_t row_bytes, const int (&rows)[kCount],
                                                int count) const {
#pragma unroll
    for (int first = 0; first < kCount; first += 4) {
      uint32_t words[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = first + j;
        const auto* chunk = reinterpret_cast<const uint16_t*>(address(base, i, rows[i], row_bytes));
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const bool low = rows[i] >= 0 && 2 * word < count;
          const bool high = rows[i] >= 0 && 2 * word + 1 < count;
          words[j][word] = (low ? uint32_t{__ldg(chunk + 2 * word)} : 0) |
                           (high ? uint32_t{__ldg(chunk + 2 * word + 1)} << 16 : 0);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::store_shared_16(to + (first + j) * (kRowStep * Layout::kPitch), words[j][0],
                             words[j][1], words[j][2], words[j][3]);
      }
    }
  }

  int first_row_;
  int chunk_;
};

}  // namespace dropless::cuda
