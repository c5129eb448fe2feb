// An operand whose rows lie in token order: the loading warpgroup looks up where a row is and
// copies it itself, 16 bytes a thread, into the layout that the copy engine gives the other
// operand.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/tile/gemm_tile.h"
#include "cuda/tile/row_map.cuh"

namespace dropless::cuda {

// Row r of the groups is row map.row(r) of data [T, width], or zeros if there is none.
struct RowSource {
  const uint8_t* data;  // 16-byte aligned
  RowMap map;
  uint32_t units;  // of 16 bytes in a row; those of T rows count in 31 bits
};

// A thread's part in copying rows: of 64 rows of 128 bytes, 16 bytes of every 16th row. All 128
// threads of the loading warpgroup call together. kRows: rows of a stage, 64 or 128.
template <int kRows>
class GatheredRows {
 public:
  // Rows whose slots are read at a time: a warp copies 32 of them, and each lane reads one's slot.
  static constexpr int kWindow = 2 * kChunk;

  __device__ GatheredRows(const RowSource& source, int thread)
      : source_(source),
        lane_(thread % 32),
        unit_(thread % 8),
        warp_row_(thread / 32 * 4),
        // The swizzle of 128 bytes depends on the row modulo 8, which all rows of a thread share.
        place_(thread / 8 * 128 + ((thread % 8 ^ (thread / 8 & 7)) << 4)) {}

  // Starts reading the slots of the window of rows from `first` on, of which `rows` exist.
  __device__ __forceinline__ void read_window(int first, int rows) {
    const int row = lane_ / 16 * kChunk + lane_ % 16 / 4 * 16 + warp_row_ + lane_ % 4;
    slot_ = row < rows ? __ldg(source_.map.slot_of_row + first + row) : -1;
  }

  // Turns to the window that was read last.
  __device__ __forceinline__ void enter_window() {
    const int token = source_.map.experts_per_token.divide(slot_ < 0 ? 0 : slot_);
    window_ = slot_ < 0 || token >= source_.map.tokens ? kAbsent : token * source_.units;
  }

  // Makes rows 64 * block .. 64 * block + kRows - 1 of the window those that copy() copies.
  __device__ __forceinline__ void select(int block) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      at_[i] = __shfl_sync(~0u, window_, 16 * block + 4 * i + lane_ / 8);
    }
  }

  // Starts copying units first .. first + 7 of every row; those from `end` on are zeros.
  __device__ __forceinline__ void copy(const uint8_t* smem, int first, int end) const {
    const uint32_t to = ptx::shared_address(smem) + place_;
    const bool inside = first + unit_ < end;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      ptx::copy_async_16(to + i * 16 * 128, source_.data + uint64_t{at_[i] + first + unit_} * 16,
                         inside && at_[i] != kAbsent);
    }
  }

 private:
  static constexpr int kLaneRows = kRows / 16;
  static constexpr uint32_t kAbsent = ~0u;
  static_assert(kRows == kChunk || kRows == kWindow);

  const RowSource& source_;
  int lane_, unit_, warp_row_, place_;
  int slot_ = -1;
  uint32_t window_ = kAbsent;  // where a row starts in `data`, in units
  uint32_t at_[kLaneRows];
};

}  // namespace dropless::cuda
