// Tensor maps for the copy engine, encoded on the host from pointers and shapes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless::cuda {

// A stack of `planes` row-major matrices [rows, cols]; all strides are in bytes.
struct MatrixStack {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t cols = 0;
  int64_t rows = 0;
  int64_t planes = 1;
  int64_t row_bytes = 0;
  int64_t plane_bytes = 0;
};

// The dense stack [planes, rows, cols].
MatrixStack dense_stack(const void* data, DType dtype, int64_t planes, int64_t rows, int64_t cols);

// Why the copy engine cannot address the stack, or ok: bases and strides must be multiples of 16
// bytes. `name` is the argument the message speaks of.
Status check_tma(const MatrixStack& stack, const char* name);

// A map with axes (column, row, plane) and a box of box_bytes x box_rows x 1, swizzled by box_bytes
// (64 or 128); what lies outside the stack reads as 0 and is not written.
Status encode_tensor_map(const MatrixStack& stack, int box_rows, const char* name, CUtensorMap* map,
                         int box_bytes = 128);

}  // namespace dropless::cuda
