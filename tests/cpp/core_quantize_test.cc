// The scalar rules of e4m3 and of block scales.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "core/float_environment.h"
#include "dropless/quantize.h"

namespace dropless {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();

// The value of a code by the format's definition: sign, 4 bits of exponent with bias 7, 3 of
// mantissa.
double value_of(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * std::exp2(exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

TEST(E4M3, DecodesAll256Codes) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(value, value_of(code)) << code;
      EXPECT_EQ(std::signbit(value), (code & 0x80) != 0) << code;
    }
  }
}

TEST(E4M3, EncodesEveryCodesValueAsThatCode) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7F) == 0x7F) continue;
    EXPECT_EQ(encode_e4m3(static_cast<float>(value_of(code))), code);
  }
}

TEST(E4M3, RoundsToNearestAndTiesToEven) {
  for (int code = 0; code < 0x7E; ++code) {
    // Midpoints of neighbours are exact in float32.
    const float middle = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(encode_e4m3(middle), even) << code;
    EXPECT_EQ(encode_e4m3(std::nextafter(middle, 0.0f)), code) << code;
    EXPECT_EQ(encode_e4m3(std::nextafter(middle, kInf)), code + 1) << code;
    EXPECT_EQ(encode_e4m3(-middle), 0x80 | even) << code;
  }
}

TEST(E4M3, I3_SaturatesAndNeverGivesNanForFiniteValues) {
  for (const float value : {448.0f, 449.0f, 464.0f, 480.0f, 512.0f, 3e38f, kMax}) {
    EXPECT_EQ(encode_e4m3(value), 0x7E) << value;
    EXPECT_EQ(encode_e4m3(-value), 0xFE) << value;
  }
}

TEST(E4M3, NonFiniteGivesNanAndZeroKeepsItsSign) {
  for (const float value : {kInf, -kInf, kNan, -kNan}) EXPECT_EQ(encode_e4m3(value), 0x7F);
  EXPECT_EQ(encode_e4m3(std::bit_cast<float>(0xFFFFFFFFu)), 0x7F);
  EXPECT_EQ(encode_e4m3(0.0f), 0x00);
  EXPECT_EQ(encode_e4m3(-0.0f), 0x80);
  EXPECT_EQ(encode_e4m3(1e-40f), 0x00);
  EXPECT_EQ(encode_e4m3(-1e-40f), 0x80);
}

TEST(BlockScale, I1_AllZeroBlockHasScaleOne) {
  for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
    EXPECT_EQ(block_scale(0.0f, rounding), 1.0f);
  }
}

TEST(BlockScale, I2_TinyMaximaGiveTheSmallestNormalScale) {
  for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
    for (const float amax : {1e-38f, 0x1p-126f, 1.4e-45f, 1e-40f, 448 * 0x1p-127f}) {
      EXPECT_EQ(block_scale(amax, rounding), 0x1p-126f) << amax;
    }
  }
  EXPECT_EQ(block_scale(1e-30f, ScaleRounding::kFp32), 1e-30f / 448.0f);
}

TEST(BlockScale, IsTheQuotientInFp32) {
  for (const float amax : {1.0f, 3.0f, 447.9f, 448.0f, 449.0f, 1e4f, 3e38f, kMax}) {
    EXPECT_EQ(block_scale(amax, ScaleRounding::kFp32), amax / 448.0f);
  }
}

TEST(BlockScale, I4_PowersOfTwoHoldAroundEveryExponent) {
  for (int n = -130; n <= 119; ++n) {
    const float at = std::ldexp(448.0f, n);
    for (const float amax : {std::nextafter(at, 0.0f), at, std::nextafter(at, kInf)}) {
      const float scale = block_scale(amax, ScaleRounding::kPow2);
      int exponent;
      EXPECT_EQ(std::frexp(scale, &exponent), 0.5f) << "not a power of two for " << amax;
      const float scaled = amax * (1.0f / scale);
      EXPECT_NE(encode_e4m3(scaled) & 0x7F, 0x7F) << amax;
      // The block's largest value may be clipped by no more than the rounding of amax / 448.
      EXPECT_LE(scaled, std::nextafter(448.0f, kInf)) << amax;
      if (n < -126) continue;
      // Above 448 * 2^n the quotient may still round to 2^n.
      EXPECT_GE(scale, std::ldexp(1.0f, n)) << amax;
      EXPECT_LE(scale, std::ldexp(1.0f, amax <= at ? n : n + 1)) << amax;
    }
  }
}

#if defined(__SSE__)
TEST(FloatEnvironment, I2_SubnormalsSurviveOnThreadsThatFlushThem) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  volatile float tiny = 1e-40f;
  const float flushed = tiny * 2.0f;
  const float scale = block_scale(tiny, ScaleRounding::kFp32);
  float kept;
  {
    const ScopedIeeeFloats ieee;
    kept = tiny * 2.0f;
  }
  const float again = tiny * 2.0f;
  _mm_setcsr(saved);
  EXPECT_EQ(std::bit_cast<uint32_t>(flushed), 0u);
  EXPECT_NE(std::bit_cast<uint32_t>(kept), 0u);
  EXPECT_EQ(std::bit_cast<uint32_t>(again), 0u);
  EXPECT_EQ(scale, 0x1p-126f);
}
#endif

}  // namespace
}  // namespace dropless
