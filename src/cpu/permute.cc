#include <cstring>

#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/chunks.h"
#include "cpu/large_pages.h"
#include "dropless/combine.h"

namespace dropless::cpu {

Status permute(const PermuteArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.x.dims[0];
  const int64_t row_bytes = args.x.dims[1] * size_of(args.x.dtype);
  const int32_t* slot_of_row = args.slot_of_row.as<int32_t>();
  if (row_bytes == 0) return Status();
  prefer_large_pages({args.rows});
  for_chunks(
      executor, args.rows.dims[0], rows_per_chunk(row_bytes), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t token = token_of_slot(slot_of_row[row], args.experts_per_token, tokens);
          char* out = row_address(args.rows, row, row_bytes);
          if (token < 0) {
            std::memset(out, 0, static_cast<size_t>(row_bytes));
          } else {
            std::memcpy(out, row_address(args.x, token, row_bytes), static_cast<size_t>(row_bytes));
          }
        }
      });
  return Status();
} catch (...) {
  return exception_status("permute");
}

}  // namespace dropless::cpu
