// Blocks of 128 rows, counted from each expert's first row: how FP8 weight gradients lay out their
// operands in scratch.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "dropless/types.h"

namespace dropless {

// Block that the first row of expert e starts, where offset = offsets[e]. It needs no sum over the
// experts before it: offset / 128 + e grows from one expert to the next by at least the expert's
// own blocks. What is left out between two experts is never more than one block.
DROPLESS_HOST_DEVICE constexpr int64_t first_token_block(int64_t offset, int64_t expert) {
  return offset / kScaleBlock + expert;
}

// Blocks that M rows of E experts can reach.
DROPLESS_HOST_DEVICE constexpr int64_t token_blocks(int64_t rows, int64_t experts) {
  return rows / kScaleBlock + experts;
}

// An operand [M, planes, width] with its rows in blocks: codes [blocks, planes, columns, 128] and
// scales [blocks, planes, columns], columns being the width rounded up to whole tiles of 128.
struct BlockedOperand {
  int64_t blocks = 0;
  int64_t planes = 1;
  int64_t columns = 0;

  DROPLESS_HOST_DEVICE constexpr BlockedOperand(int64_t rows, int64_t experts, int64_t num_planes,
                                                int64_t width)
      : blocks(token_blocks(rows, experts)),
        planes(num_planes),
        columns(ceil_div(width, kScaleBlock) * kScaleBlock) {}
  // Columns of all planes.
  DROPLESS_HOST_DEVICE constexpr int64_t row_columns() const { return planes * columns; }
  DROPLESS_HOST_DEVICE constexpr int64_t code_bytes() const {
    return blocks * row_columns() * kScaleBlock;
  }
  DROPLESS_HOST_DEVICE constexpr int64_t scale_bytes() const {
    return blocks * row_columns() * static_cast<int64_t>(sizeof(float));
  }
};

}  // namespace dropless
