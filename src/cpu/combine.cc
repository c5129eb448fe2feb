#include "dropless/combine.h"

#include <cstring>
#include <vector>

#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/chunks.h"
#include "cpu/large_pages.h"
#include "cpu/prefetch.h"
#include "cpu/vector_ops.h"

namespace dropless::cpu {
namespace {

// Results of this size are in no cache when they are read: they are written past the caches, which
// saves reading their lines first. The last-level caches of servers hold 32 MiB and more.
constexpr int64_t kStreamedBytes = int64_t{32} << 20;

}  // namespace

Status combine(const CombineArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.row_of_slot.dims[0];
  const int64_t per_token = args.row_of_slot.dims[1];
  const int64_t rows = args.rows.dims[0];
  const int64_t width = args.rows.dims[1];
  const int64_t row_bytes = width * size_of(args.rows.dtype);
  const int64_t out_bytes = width * size_of(args.out.dtype);
  const int32_t* row_of_slot = args.row_of_slot.as<int32_t>();
  const VectorOps& ops = vector_ops();
  prefer_large_pages({args.out});
  const bool streaming = args.out.bytes() >= kStreamedBytes;
  const int64_t chunk = rows_per_chunk(row_bytes * per_token + out_bytes);
  for_chunks(executor, tokens, chunk, [&](int64_t begin, int64_t end) {
    std::vector<const void*> sources(static_cast<size_t>(per_token));
    std::vector<float> weights(sources.size());
    for (int64_t t = begin; t < end; ++t) {
      // The rows of a token lie anywhere, and each is too short for the hardware to follow.
      for (int64_t slot = (t + 1) * per_token; t + 1 < end && slot < (t + 2) * per_token; ++slot) {
        const int64_t row = row_of_slot[slot];
        if (row >= 0 && row < rows) {
          prefetch_bytes(row_address(args.rows, row, row_bytes), row_bytes);
        }
      }
      size_t count = 0;
      for (int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
        const int64_t row = row_of_slot[slot];
        if (row < 0 || row >= rows) continue;
        sources[count] = row_address(args.rows, row, row_bytes);
        weights[count++] = args.weights.given() ? args.weights.as<float>()[slot] : 1.0f;
      }
      ops.weighted_sum(sources.data(), weights.data(), static_cast<int64_t>(count),
                       args.rows.dtype == DType::kBF16, width, row_address(args.out, t, out_bytes),
                       args.out.dtype == DType::kBF16, streaming);
    }
  });
  return Status();
} catch (...) {
  return exception_status("combine");
}

Status combine_backward(const CombineBackwardArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.row_of_slot.dims[0];
  const int64_t per_token = args.row_of_slot.dims[1];
  const int64_t rows = args.rows.dims[0];
  const int64_t width = args.rows.dims[1];
  const int64_t dy_bytes = width * size_of(args.dy.dtype);
  const int64_t row_bytes = width * size_of(args.rows.dtype);
  const int32_t* row_of_slot = args.row_of_slot.as<int32_t>();
  const int32_t* slot_of_row = args.slot_of_row.as<int32_t>();
  const VectorOps& ops = vector_ops();

  // By token, so that dy is read once; every row that a slot owns is written by that slot.
  const int64_t chunk = rows_per_chunk(2 * row_bytes * per_token + dy_bytes);
  for_chunks(executor, tokens, chunk, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin * per_token; slot < end * per_token; ++slot) {
      const int64_t row = row_of_slot[slot];
      float& d_weight = args.d_weights.as<float>()[slot];
      d_weight = 0.0f;
      if (row < 0 || row >= rows || slot_of_row[row] != slot) continue;
      d_weight = ops.scale_and_dot(
          row_address(args.dy, slot / per_token, dy_bytes), args.dy.dtype == DType::kBF16,
          row_address(args.rows, row, row_bytes), args.rows.dtype == DType::kBF16,
          args.weights.as<float>()[slot], width, row_address(args.d_rows, row, row_bytes));
    }
  });
  if (row_bytes == 0) return Status();
  for_chunks(executor, rows, rows_per_chunk(row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t slot = slot_of_row[row];
      if (token_of_slot(slot, per_token, tokens) >= 0 && row_of_slot[slot] == row) continue;
      std::memset(row_address(args.d_rows, row, row_bytes), 0, static_cast<size_t>(row_bytes));
    }
  });
  return Status();
} catch (...) {
  return exception_status("combine_backward");
}

}  // namespace dropless::cpu
