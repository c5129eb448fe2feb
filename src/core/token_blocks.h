// Blocks of 128 rows, counted from each expert's first row: how FP8 weight gradients lay out their
// operands in scratch.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/index.h"
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

// Of a block's 128 rows, the one whose code is `position` of a column's 128. Within every 16, rows
// r and r + 8 are neighbours: a thread that holds a tile's fragments has both. The order is the
// same in all operands, and products sum over it.
DROPLESS_HOST_DEVICE constexpr int token_block_row(int position) {
  return position / 16 * 16 + position % 16 / 2 + position % 2 * 8;
}

// Where in a block [columns, 128] the code of a column and a row lies: the eight units of 16 codes
// of a column are swizzled as wgmma reads them. Planes are columns that follow.
DROPLESS_HOST_DEVICE constexpr int64_t token_block_byte(int64_t column, int64_t row) {
  return column * kScaleBlock + ((row / 16) ^ (column % 8)) * 16 + row % 8 * 2 + row % 16 / 8;
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

// Quantises the rows `range` of values [M, planes, width], all of one expert, into the expert's
// blocks of codes [blocks, planes, columns, 128] and scales. Defined for host code.
void quantize_token_blocks(const ConstTensor& values, RowRange range, int64_t expert,
                           ScaleRounding rounding, const Tensor& codes, const Tensor& scale);

}  // namespace dropless
