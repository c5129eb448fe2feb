// Floats as unsigned integers in the order of top-k: larger first, NaN after everything.
#pragma once

#include <cmath>
#include <cstdint>

namespace dropless::cuda {

// Below every key of a value: an expert that is taken, or is none at all.
constexpr uint32_t kNoKey = 0;
// -inf has key 0x007FFFFF, so NaN has room below it.
constexpr uint32_t kNanKey = 1;

__device__ inline uint32_t ordered_key(float value) {
  if (value != value) return kNanKey;
  // Adding +0 makes -0 and +0, which are equal, one key.
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The value of a key; +0 for both zeros.
__device__ inline float key_value(uint32_t key) {
  if (key == kNanKey) return NAN;
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

}  // namespace dropless::cuda
