#include "dropless/grouped_gemm.h"

#include "core/exception_status.h"
#include "reference/operand.h"

namespace dropless::reference {

Status grouped_gemm(const GroupedGemmArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t rows = args.lhs.dims[0];         // M
  const int64_t depth = args.lhs.dims[1];        // Kc
  const int64_t cols = args.out.dims[1];         // N
  const int64_t num_experts = args.rhs.dims[0];  // E

  for (int64_t i = 0; i < rows * cols; ++i) store(args.out, i, 0.0);
  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    if (range.size() == 0) continue;
    const Values rhs = matrix_values(args.rhs, args.rhs_scale, e, args.rhs_transposed);
    for (int64_t row = range.begin; row < range.end; ++row) {
      Values out = bias_values(args.bias, e, cols);
      add_product(row_values(args.lhs, args.lhs_scale, row, depth), rhs, out);
      for (int64_t col = 0; col < cols; ++col) {
        store(args.out, row_index(row, col, cols), out[static_cast<size_t>(col)]);
      }
    }
  }
  return Status();
} catch (...) {
  return exception_status("grouped_gemm");
}

}  // namespace dropless::reference
