#include "dropless/combine.h"

#include <vector>

#include "core/element.h"
#include "core/exception_status.h"
#include "core/index.h"

namespace dropless::reference {
namespace {

// The row of a slot, or -1 if it has none.
int64_t row_of(const ConstTensor& row_of_slot /* [T, K] */, int64_t slot, int64_t rows) {
  const int64_t row = row_of_slot.as<int32_t>()[slot];
  return row < rows ? row : -1;
}

}  // namespace

Status permute(const PermuteArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.x.dims[0];
  const int64_t width = args.x.dims[1];
  for (int64_t row = 0; row < args.rows.dims[0]; ++row) {
    const int64_t token =
        token_of_slot(args.slot_of_row.as<int32_t>()[row], args.experts_per_token, tokens);
    for (int64_t i = 0; i < width; ++i) {
      store(args.rows, row * width + i, token < 0 ? 0.0 : load(args.x, token * width + i));
    }
  }
  return Status();
} catch (...) {
  return exception_status("permute");
}

Status combine(const CombineArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.row_of_slot.dims[0];
  const int64_t per_token = args.row_of_slot.dims[1];
  const int64_t rows = args.rows.dims[0];
  const int64_t width = args.rows.dims[1];
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      double sum = 0;
      for (int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
        const int64_t row = row_of(args.row_of_slot, slot, rows);
        if (row < 0) continue;
        const double weight = args.weights.given() ? load(args.weights, slot) : 1.0;
        sum += weight * load(args.rows, row * width + i);
      }
      store(args.out, t * width + i, sum);
    }
  }
  return Status();
} catch (...) {
  return exception_status("combine");
}

Status combine_backward(const CombineBackwardArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.row_of_slot.dims[0];
  const int64_t per_token = args.row_of_slot.dims[1];
  const int64_t rows = args.rows.dims[0];
  const int64_t width = args.rows.dims[1];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = args.slot_of_row.as<int32_t>()[row];
    const int64_t token = token_of_slot(slot, per_token, tokens);
    for (int64_t i = 0; i < width; ++i) {
      const double value =
          token < 0 ? 0.0 : load(args.weights, slot) * load(args.dy, token * width + i);
      store(args.d_rows, row * width + i, value);
    }
  }
  for (int64_t slot = 0; slot < tokens * per_token; ++slot) {
    const int64_t row = row_of(args.row_of_slot, slot, rows);
    double sum = 0;
    for (int64_t i = 0; row >= 0 && i < width; ++i) {
      sum += load(args.dy, slot / per_token * width + i) * load(args.rows, row * width + i);
    }
    store(args.d_weights, slot, sum);
  }
  return Status();
} catch (...) {
  return exception_status("combine_backward");
}

Status group_sum(const GroupSumArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t num_experts = args.out.dims[0];
  const int64_t width = args.out.dims[1] * args.out.dims[2];  // P*N
  const int64_t rows = args.slot_of_row.given() ? args.slot_of_row.dims[0] : args.x.dims[0];
  const int64_t per_token = args.weights.given() ? args.weights.dims[1] : args.experts_per_token;
  // Tokens bound the slots; without weights and gather no slot is looked at.
  const int64_t tokens =
      args.gather ? args.x.dims[0] : (args.weights.given() ? args.weights.dims[0] : 0);
  const bool by_slot = args.gather || args.weights.given();
  for (int64_t e = 0; e < num_experts; ++e) {
    std::vector<double> sum(width, 0.0);
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t slot = by_slot ? args.slot_of_row.as<int32_t>()[row] : row;
      const int64_t token = by_slot ? token_of_slot(slot, per_token, tokens) : row;
      if (token < 0) continue;
      const double weight = args.weights.given() ? load(args.weights, slot) : 1.0;
      const int64_t source = args.gather ? token : row;
      for (int64_t i = 0; i < width; ++i) sum[i] += weight * load(args.x, source * width + i);
    }
    for (int64_t i = 0; i < width; ++i) store(args.out, e * width + i, sum[i]);
  }
  return Status();
} catch (...) {
  return exception_status("group_sum");
}

}  // namespace dropless::reference
