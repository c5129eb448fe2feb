#include "dropless/grouped_gemm.h"

#include "reference/operand.h"

namespace dropless::reference {

Status grouped_gemm(const GroupedGemmArgs& args) {
  if (const Status status = check(args); !status.ok()) return status;
  const int64_t rows = args.lhs.dims[0];         // M
  const int64_t depth = args.lhs.dims[1];        // Kc
  const int64_t cols = args.out.dims[1];         // N
  const int64_t num_experts = args.rhs.dims[0];  // E
  const int32_t* offsets = args.offsets.as<int32_t>();

  for (int64_t i = 0; i < rows * cols; ++i) store(args.out, i, 0.0);
  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange range = rows_of_expert(offsets, e, rows);
    for (int64_t row = range.begin; row < range.end; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        double sum = args.bias.given() ? load(args.bias, row_index(e, col, cols)) : 0.0;
        for (int64_t k = 0; k < depth; ++k) {
          const double rhs = args.rhs_transposed
                                 ? matrix_element(args.rhs, args.rhs_scale, e, col, k)
                                 : matrix_element(args.rhs, args.rhs_scale, e, k, col);
          sum += row_element(args.lhs, args.lhs_scale, row, k, depth) * rhs;
        }
        store(args.out, row_index(row, col, cols), sum);
      }
    }
  }
  return Status();
}

}  // namespace dropless::reference
