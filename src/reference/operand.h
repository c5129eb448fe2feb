// Operands of the reference products in double, dequantised exactly: code times scale.
#pragma once

#include <vector>

#include "core/element.h"
#include "core/index.h"
#include "dropless/types.h"

namespace dropless::reference {

using Values = std::vector<double>;

// Row `row` of an array whose last axis has `width` elements; `scale`, if given, covers it in 1x128
// blocks.
inline Values row_values(const ConstTensor& x, const ConstTensor& scale, int64_t row,
                         int64_t width) {
  Values values;
  for (int64_t col = 0; col < width; ++col) {
    const double value = load(x, row_index(row, col, width));
    values.push_back(scale.given() ? value * load(scale, row_scale_index(row, col, width)) : value);
  }
  return values;
}

// Matrix e of [E, rows, cols], or its transpose; `scale`, if given, covers it in 128x128 blocks.
inline Values matrix_values(const ConstTensor& w, const ConstTensor& scale, int64_t e,
                            bool transposed) {
  const int64_t rows = w.dims[1];
  const int64_t cols = w.dims[2];
  Values values(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      double value = load(w, matrix_index(e, i, j, rows, cols));
      if (scale.given()) value *= load(scale, matrix_scale_index(e, i, j, rows, cols));
      values[static_cast<size_t>(transposed ? j * rows + i : i * cols + j)] = value;
    }
  }
  return values;
}

// Row `row` of [rows, width], or zeros where there is no array: a bias that was not given.
inline Values bias_values(const ConstTensor& bias, int64_t row, int64_t width) {
  return bias.given() ? row_values(bias, {}, row, width) : Values(static_cast<size_t>(width), 0.0);
}

// out[n] += sum over k of x[k] * w[k, n].
inline void add_product(const Values& x, const Values& w, Values& out) {
  for (size_t k = 0; k < x.size(); ++k) {
    for (size_t n = 0; n < out.size(); ++n) out[n] += x[k] * w[k * out.size() + n];
  }
}

}  // namespace dropless::reference
