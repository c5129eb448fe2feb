// Operands of the reference products, dequantised exactly: code times scale in double.
#pragma once

#include "core/element.h"
#include "core/index.h"
#include "dropless/types.h"

namespace dropless::reference {

// Element (row, col) of an array whose last axis has `width` elements; `scale`, if given, covers it
// in 1x128 blocks.
inline double row_element(const ConstTensor& x, const ConstTensor& scale, int64_t row, int64_t col,
                          int64_t width) {
  const double value = load(x, row_index(row, col, width));
  return scale.given() ? value * load(scale, row_scale_index(row, col, width)) : value;
}

// Element (e, i, j) of [E, rows, cols]; `scale`, if given, covers each matrix in 128x128 blocks.
inline double matrix_element(const ConstTensor& w, const ConstTensor& scale, int64_t e, int64_t i,
                             int64_t j) {
  const int64_t rows = w.dims[1];
  const int64_t cols = w.dims[2];
  const double value = load(w, matrix_index(e, i, j, rows, cols));
  return scale.given() ? value * load(scale, matrix_scale_index(e, i, j, rows, cols)) : value;
}

}  // namespace dropless::reference
