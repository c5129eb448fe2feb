// Single elements of tensors: conversions between storage types and arithmetic types.
#pragma once

#include <bit>
#include <cstdint>

#include "dropless/quantize.h"
#include "dropless/types.h"

namespace dropless {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest even; NaN stays NaN (quietened), overflow gives infinity.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

// Element i of a floating-point tensor (float32, bfloat16 or float8 code), as stored.
inline double load(const ConstTensor& t, int64_t i) {
  switch (t.dtype) {
    case DType::kF32:
      return t.as<float>()[i];
    case DType::kBF16:
      return bf16_to_float(t.as<uint16_t>()[i]);
    case DType::kF8E4M3:
      return decode_e4m3(t.as<uint8_t>()[i]);
    case DType::kI32:
      return t.as<int32_t>()[i];
    case DType::kU8:
      return t.as<uint8_t>()[i];
  }
  return 0;
}

// Rounds `value` to a float32 or bfloat16 element.
inline void store(const Tensor& t, int64_t i, double value) {
  if (t.dtype == DType::kBF16) {
    t.as<uint16_t>()[i] = float_to_bf16(static_cast<float>(value));
  } else {
    t.as<float>()[i] = static_cast<float>(value);
  }
}

}  // namespace dropless
