#include "dropless/quantize.h"

#include <algorithm>
#include <vector>

#include "core/element.h"
#include "core/exception_status.h"
#include "core/index.h"
#include "reference/quantize_block.h"

namespace dropless::reference {

Status quantize_rows(const QuantizeRowsArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t rows = args.x.dims[0];
  const int64_t cols = args.x.dims[1];
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < cols; begin += kScaleBlock) {
      const int64_t end = std::min(begin + kScaleBlock, cols);
      std::vector<float> values;
      for (int64_t col = begin; col < end; ++col) {
        values.push_back(static_cast<float>(load(args.x, row_index(row, col, cols))));
      }
      const QuantizedBlock block = quantize_block(values, args.scale_rounding);
      std::copy(block.codes.begin(), block.codes.end(),
                args.q.as<uint8_t>() + row_index(row, begin, cols));
      args.scale.as<float>()[row_scale_index(row, begin, cols)] = block.scale;
    }
  }
  return Status();
} catch (...) {
  return exception_status("quantize_rows");
}

Status quantize_weight(const QuantizeWeightArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t in = args.w.dims[1];
  const int64_t out = args.w.dims[2];
  const auto each_of = [&](int64_t e, int64_t i0, int64_t j0, const auto& visit) {
    for (int64_t i = i0; i < std::min(i0 + kScaleBlock, in); ++i) {
      for (int64_t j = j0; j < std::min(j0 + kScaleBlock, out); ++j) {
        visit(matrix_index(e, i, j, in, out), matrix_index(e, j, i, out, in));
      }
    }
  };
  for (int64_t e = 0; e < args.w.dims[0]; ++e) {
    for (int64_t i0 = 0; i0 < in; i0 += kScaleBlock) {
      for (int64_t j0 = 0; j0 < out; j0 += kScaleBlock) {
        std::vector<float> values;
        each_of(e, i0, j0, [&](int64_t index, int64_t) {
          values.push_back(static_cast<float>(load(args.w, index)));
        });
        const QuantizedBlock block = quantize_block(values, args.scale_rounding);
        size_t next = 0;
        each_of(e, i0, j0, [&](int64_t index, int64_t index_t) {
          args.q.as<uint8_t>()[index] = block.codes[next];
          args.q_t.as<uint8_t>()[index_t] = block.codes[next];
          ++next;
        });
        args.scale.as<float>()[matrix_scale_index(e, i0, j0, in, out)] = block.scale;
        args.scale_t.as<float>()[matrix_scale_index(e, j0, i0, out, in)] = block.scale;
      }
    }
  }
  return Status();
} catch (...) {
  return exception_status("quantize_weight");
}

}  // namespace dropless::reference
