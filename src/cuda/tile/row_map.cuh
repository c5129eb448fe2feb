// Which row of an array in token order stands at a row of the expert order.
#pragma once

#include <cstdint>

namespace dropless::cuda {

// A divisor d with 1 <= d < 2^31, as a multiplication: a division takes some 20 instructions. For
// 0 <= n < 2^31 the quotient is exact: multiplier * d = 2^(31 + shift) + error, where error < d <=
// 2^shift, so that n * error < 2^(31 + shift) never reaches the next quotient.
struct Divisor {
  uint32_t multiplier = 0;
  int shift = 0;

  static Divisor of(int64_t d) {
    int shift = 0;
    while ((int64_t{1} << shift) < d) ++shift;
    const uint64_t numerator = uint64_t{1} << (31 + shift);
    return {static_cast<uint32_t>((numerator + d - 1) / d), shift};
  }
  __host__ __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>((static_cast<uint64_t>(n) * multiplier) >> (31 + shift));
  }
};

struct RowMap {
  const int32_t* slot_of_row = nullptr;  // [M], or null: rows are in expert order already
  Divisor experts_per_token;
  int tokens = 0;  // T

  // Row r itself, or the token of its slot; -1 if there is none.
  __device__ __forceinline__ int row(int r) const { return resolve(look_up(r)); }

  // The same in two steps, so that a load and its use can stand apart.
  __device__ __forceinline__ int look_up(int r) const {
    return slot_of_row == nullptr ? r : __ldg(slot_of_row + r);
  }
  __device__ __forceinline__ int resolve(int found) const {
    if (slot_of_row == nullptr) return found;
    const int token = experts_per_token.divide(found < 0 ? 0 : found);
    return found < 0 || token >= tokens ? -1 : token;
  }
};

}  // namespace dropless::cuda
