#include <algorithm>
#include <vector>

#include "core/element.h"
#include "core/exception_status.h"
#include "core/index.h"
#include "core/token_blocks.h"
#include "dropless/grouped_gemm.h"
#include "reference/quantize_block.h"

namespace dropless::reference {
namespace {

// One operand's rows of one expert as [rows, width]; rows whose slot is "none" are 0.
struct Operand {
  std::vector<double> values;

  Operand(const ConstTensor& source, RowRange range, bool gather, const GroupedWgradArgs& args,
          int64_t width)
      : values(range.size() * width, 0.0) {
    for (int64_t r = 0; r < range.size(); ++r) {
      int64_t row = range.begin + r;
      if (gather) {
        row = token_of_slot(args.slot_of_row.as<int32_t>()[row], args.experts_per_token,
                            source.dims[0]);
      }
      for (int64_t i = 0; row >= 0 && i < width; ++i) {
        values[r * width + i] = load(source, row_index(row, i, width));
      }
    }
  }

  // What an operand that comes quantised stands for.
  Operand(const ConstTensor& codes, const ConstTensor& scale, RowRange range, int64_t expert,
          int64_t width)
      : values(range.size() * codes.dims[1] * width) {
    const int64_t planes = codes.dims[1], columns = codes.dims[2];
    for (int64_t r = 0; r < range.size(); ++r) {
      const int64_t first =
          (first_token_block(range.begin, expert) + r / kScaleBlock) * planes * columns;
      for (int64_t i = 0; i < planes * width; ++i) {
        const int64_t column = i / width * columns + i % width;
        const int64_t at = first * kScaleBlock + token_block_byte(column, r % kScaleBlock);
        values[r * planes * width + i] = load(codes, at) * load(scale, first + column);
      }
    }
  }

  // Replaces the values by what FP8 keeps of them, in blocks of 128 rows x 1 column.
  void quantize(int64_t width, ScaleRounding rounding) {
    const int64_t rows = width == 0 ? 0 : static_cast<int64_t>(values.size()) / width;
    for (int64_t begin = 0; begin < rows; begin += kScaleBlock) {
      const int64_t end = std::min(begin + kScaleBlock, rows);
      for (int64_t i = 0; i < width; ++i) {
        std::vector<float> column;
        for (int64_t r = begin; r < end; ++r) {
          column.push_back(static_cast<float>(values[r * width + i]));
        }
        const QuantizedBlock block = quantize_block(column, rounding);
        for (int64_t r = begin; r < end; ++r) {
          values[r * width + i] =
              static_cast<double>(decode_e4m3(block.codes[r - begin])) * block.scale;
        }
      }
    }
  }
};

}  // namespace

Status grouped_wgrad(const GroupedWgradArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t kc = args.dw[0].dims[1];
  const int64_t planes = args.dy.dims[1];  // P
  const int64_t n = args.dw[0].dims[2];
  const int64_t num_experts = args.dw[0].dims[0];
  const int64_t rows =
      args.gather == Gather::kNone ? args.x.dims[0] : args.slot_of_row.dims[0];  // M
  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    const auto operand = [&](const ConstTensor& source, const ConstTensor& scale, bool gather,
                             int64_t operand_planes, int64_t width) {
      if (scale.given()) return Operand(source, scale, range, e, width);
      Operand found(source, range, gather, args, operand_planes * width);
      if (args.fp8) found.quantize(operand_planes * width, args.scale_rounding);
      return found;
    };
    const Operand x = operand(args.x, args.x_scale, args.gather == Gather::kLhs, 1, kc);
    const Operand dy = operand(args.dy, args.dy_scale, args.gather == Gather::kRhs, planes, n);
    for (int64_t p = 0; p < planes; ++p) {
      for (int64_t i = 0; i < kc; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          const int64_t index = matrix_index(e, i, j, kc, n);
          double sum = args.accumulate ? load(args.dw[p], index) : 0.0;
          for (int64_t r = 0; r < range.size(); ++r) {
            sum += x.values[r * kc + i] * dy.values[(r * planes + p) * n + j];
          }
          store(args.dw[p], index, sum);
        }
      }
    }
  }
  return Status();
} catch (...) {
  return exception_status("grouped_wgrad");
}

}  // namespace dropless::reference
