#include <vector>

#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/chunks.h"
#include "cpu/vector_ops.h"
#include "dropless/combine.h"

namespace dropless::cpu {
namespace {

// Rows are summed in pieces of this many, counted from their expert's first row. Two roundings of
// sqrt(256) steps beat one of sqrt(M), and partial sums cost 1/256 of the rows' memory.
constexpr int64_t kRowsPerPiece = 256;

struct Piece {
  RowRange rows;
  int64_t expert;
};

}  // namespace

Status group_sum(const GroupSumArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t num_experts = args.out.dims[0];
  const int64_t width = args.out.dims[1] * args.out.dims[2];  // P*N
  const int64_t rows = args.slot_of_row.given() ? args.slot_of_row.dims[0] : args.x.dims[0];
  const bool weighted = args.weights.given();
  const int64_t per_token = weighted ? args.weights.dims[1] : args.experts_per_token;
  const int64_t tokens = args.gather ? args.x.dims[0] : (weighted ? args.weights.dims[0] : 0);
  const bool by_slot = args.gather || weighted;
  const int64_t row_bytes = width * size_of(args.x.dtype);
  const VectorOps& ops = vector_ops();

  std::vector<Piece> pieces;
  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange all = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    for (int64_t row = all.begin; row < all.end; row += kRowsPerPiece) {
      pieces.push_back({{row, std::min(row + kRowsPerPiece, all.end)}, e});
    }
  }
  std::vector<float> partial(pieces.size() * static_cast<size_t>(width), 0.0f);  // [pieces, P*N]
  for_chunks(executor, static_cast<int64_t>(pieces.size()), 1, [&](int64_t i, int64_t) {
    const RowRange range = pieces[static_cast<size_t>(i)].rows;
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t slot = by_slot ? args.slot_of_row.as<int32_t>()[row] : row;
      const int64_t token = by_slot ? token_of_slot(slot, per_token, tokens) : row;
      if (token < 0) continue;
      ops.accumulate(row_address(args.x, args.gather ? token : row, row_bytes),
                     args.x.dtype == DType::kBF16, weighted ? args.weights.as<float>()[slot] : 1.0f,
                     width, partial.data() + i * width);
    }
  });

  const ScopedIeeeFloats ieee;  // as in the pieces: the caller's thread may flush subnormals
  float* out = args.out.as<float>();
  std::fill_n(out, num_experts * width, 0.0f);
  for (size_t i = 0; i < pieces.size(); ++i) {
    ops.accumulate(partial.data() + static_cast<int64_t>(i) * width, false, 1.0f, width,
                   out + pieces[i].expert * width);
  }
  return Status();
} catch (...) {
  return exception_status("group_sum");
}

}  // namespace dropless::cpu
