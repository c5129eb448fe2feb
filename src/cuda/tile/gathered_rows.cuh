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

// What one thread of 128 copies of kRows rows of 128 bytes: 16 bytes of every 16th row. Slots of
// kSets blocks of rows can be underway.
template <int kRows, int kSets = 1>
class GatheredRows {
 public:
  __device__ GatheredRows(const RowSource& source, int thread)
      : source_(source),
        row_(thread / 8),
        unit_(thread % 8),
        // The swizzle of 128 bytes depends on the row modulo 8, which is that of the first row.
        place_(row_ * 128 + ((unit_ ^ (row_ & 7)) << 4)) {}

  // Starts reading the slots of the rows from `first` on, of which `rows` exist.
  template <int kSet = 0>
  __device__ __forceinline__ void read_slots(int first, int rows) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = row_ + 16 * i;
      slot_[kSet][i] = row < rows ? __ldg(source_.map.slot_of_row + first + row) : -1;
    }
  }

  // Makes the rows whose slots were read those that copy() copies.
  template <int kSet = 0>
  __device__ __forceinline__ void find_rows() {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int slot = slot_[kSet][i];
      const int token = source_.map.experts_per_token.divide(slot < 0 ? 0 : slot);
      at_[i] = slot < 0 || token >= source_.map.tokens ? kAbsent : token * source_.units + unit_;
    }
  }

  // Starts copying units first .. first + 7 of every row; those from `end` on are zeros.
  //
  // The order of these additions matters: as 64-bit sums of a row's start and the common offset
  // they put some instructions between one copy and the next. Eight copies in a row cost 5 to 10 %
  // of expert_up: it seems that they fill the queue of memory instructions for the multiplying
  // warps, too.
  __device__ __forceinline__ void copy(const uint8_t* smem, int first, int end) const {
    const uint32_t to = ptx::shared_address(smem) + place_;
    const uint8_t* from = source_.data + static_cast<int64_t>(first) * 16;
    const bool inside = first + unit_ < end;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      ptx::copy_async_16(to + i * 16 * 128, from + static_cast<uint64_t>(at_[i]) * 16,
                         inside && at_[i] != kAbsent);
    }
  }

 private:
  static constexpr int kLaneRows = kRows / 16;
  static constexpr uint32_t kAbsent = ~0u;

  const RowSource& source_;
  int row_, unit_, place_;
  int slot_[kSets][kLaneRows];
  uint32_t at_[kLaneRows];  // of this thread's first unit in `data`, in units
};

}  // namespace dropless::cuda
