// Parallel loops whose pieces depend on shapes alone, never on the number of threads: sums over a
// piece then have the same bits on any machine load.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/float_environment.h"
#include "dropless/executor.h"
#include "dropless/types.h"

namespace dropless::cpu {

// Calls body(begin, end) for [0, count) in pieces of `chunk`.
template <class Body>
void for_chunks(Executor& executor, int64_t count, int64_t chunk, const Body& body) {
  executor.parallel_for(ceil_div(count, chunk), [&](int64_t i) {
    const ScopedIeeeFloats ieee;
    body(i * chunk, std::min(count, (i + 1) * chunk));
  });
}

// Rows of `row_bytes` that make a piece worth handing to another thread: 128 KiB, tens of
// microseconds.
inline int64_t rows_per_chunk(int64_t row_bytes) {
  constexpr int64_t kChunkBytes = 128 * 1024;
  return std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, row_bytes));
}

// Address of row `row` of an array with `row_bytes` bytes a row.
inline const char* row_address(const ConstTensor& t, int64_t row, int64_t row_bytes) {
  return static_cast<const char*>(t.data) + row * row_bytes;
}
inline char* row_address(const Tensor& t, int64_t row, int64_t row_bytes) {
  return static_cast<char*>(t.data) + row * row_bytes;
}

}  // namespace dropless::cpu
