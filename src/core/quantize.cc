#include "dropless/quantize.h"

#include <bit>
#include <cmath>

#include "core/checker.h"

namespace dropless {
namespace {

constexpr uint8_t kE4M3Nan = 0x7F;
constexpr float kE4M3Max = 448.0f;           // 1.75 * 2^8
constexpr float kSmallestScale = 0x1p-126f;  // the smallest normal float32: 1/scale stays finite

}  // namespace

float decode_e4m3(uint8_t code) {
  const int exponent = (code >> 3) & 0xF;
  const int mantissa = code & 0x7;
  float magnitude;
  if ((code & 0x7F) == kE4M3Nan) {
    magnitude = std::bit_cast<float>(0x7FC00000u);
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    magnitude = std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7);
  }
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

uint8_t encode_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) return kE4M3Nan;
  if (magnitude >= std::bit_cast<uint32_t>(kE4M3Max)) return sign | 0x7E;
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -6) {
    // Subnormal codes count steps of 2^-9. Adding 2^14 makes the float32 ulp exactly that step, so
    // the addition itself rounds to nearest even; 8 steps is the smallest normal code, also 8.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(shifted) & 0xFu);
  }
  // Round the 23-bit mantissa to 3 bits, to nearest even; a carry moves into the exponent.
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  // Exponent bias 127 becomes 7. 448 is the largest result: larger values left above, and the
  // values between 440 and 448 round to it.
  return sign | static_cast<uint8_t>((rounded >> 20) - ((127u - 7u) << 3));
}

float block_scale(float amax, ScaleRounding rounding) {
  // Compared as bits: a thread that treats subnormals as zero must not see an all-zero block here.
  if ((std::bit_cast<uint32_t>(amax) & 0x7FFFFFFFu) == 0) return 1.0f;
  const float exact = amax / kE4M3Max;
  const float scale = exact > kSmallestScale ? exact : kSmallestScale;
  if (rounding == ScaleRounding::kFp32) return scale;
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return std::bit_cast<float>((bits + 0x7FFFFFu) & 0x7F800000u);
}

Status check(const QuantizeRowsArgs& args) {
  Checker c("quantize_rows");
  check_scale_rounding(c, args.scale_rounding);
  c.require("x", args.x, {DType::kF32, DType::kBF16}, {"R", "C"});
  c.let("ceil(C/128)", ceil_div(c.value("C"), kScaleBlock));
  c.require("q", args.q, {DType::kF8E4M3}, {"R", "C"});
  c.require("scale", args.scale, {DType::kF32}, {"R", "ceil(C/128)"});
  return c.status();
}

Status check(const QuantizeWeightArgs& args) {
  Checker c("quantize_weight");
  check_scale_rounding(c, args.scale_rounding);
  c.require("w", args.w, {DType::kF32, DType::kBF16}, {"E", "in", "out"});
  c.let("ceil(in/128)", ceil_div(c.value("in"), kScaleBlock));
  c.let("ceil(out/128)", ceil_div(c.value("out"), kScaleBlock));
  c.require("q", args.q, {DType::kF8E4M3}, {"E", "in", "out"});
  c.require("q_t", args.q_t, {DType::kF8E4M3}, {"E", "out", "in"});
  c.require("scale", args.scale, {DType::kF32}, {"E", "ceil(in/128)", "ceil(out/128)"});
  c.require("scale_t", args.scale_t, {DType::kF32}, {"E", "ceil(out/128)", "ceil(in/128)"});
  return c.status();
}

}  // namespace dropless
