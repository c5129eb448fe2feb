// The reference quantiser: block structure, both orientations of weights, edge cases of FP8 scales.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/index.h"
#include "dropless/quantize.h"
#include "tests/cpp/support/compare.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Quantized {
  Array q, scale;
};

Quantized quantize(const Array& x, ScaleRounding rounding = ScaleRounding::kFp32) {
  Quantized r{Array(DType::kF8E4M3, {x.dim(0), x.dim(1)}),
              Array(DType::kF32, {x.dim(0), ceil_div(x.dim(1), 128)})};
  EXPECT_OK(reference::quantize_rows({x, rounding, r.q, r.scale}));
  return r;
}

double dequantized(const Quantized& r, int64_t row, int64_t col) {
  const int64_t width = r.q.dim(1);
  return r.q[row * width + col] * r.scale[row * ceil_div(width, 128) + col / 128];
}

TEST(ReferenceQuantizeRows, ScalesArePerRowAnd128Columns) {
  Rng rng(51);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {1, 127, 128, 129, 300}) {
      const Array x = normal(rng, dtype, {5, width});
      const Quantized r = quantize(x);
      for (int64_t row = 0; row < 5; ++row) {
        for (int64_t block = 0; block < ceil_div(width, 128); ++block) {
          float amax = 0;
          for (int64_t c = block * 128; c < std::min(width, block * 128 + 128); ++c) {
            amax = std::max(amax, static_cast<float>(std::abs(x[row * width + c])));
          }
          EXPECT_EQ(r.scale[row * ceil_div(width, 128) + block], amax / 448.0f);
          bool reaches_448 = false;
          for (int64_t c = block * 128; c < std::min(width, block * 128 + 128); ++c) {
            const double value = x[row * width + c];
            reaches_448 |= std::abs(r.q[row * width + c]) == 448;
            // Half a step of 2^-3 relative, or of the subnormal step 2^-9 of the scale; the inverse
            // and the product are rounded in fp32.
            const double bound = std::max(std::abs(value) * 0x1p-4, amax / 448.0 * 0x1p-10);
            EXPECT_NEAR(dequantized(r, row, c), value, bound * (1 + 0x1p-20));
          }
          EXPECT_TRUE(reaches_448);  // i3: the largest value lands exactly on +-448
        }
      }
    }
  }
}

TEST(ReferenceQuantizeRows, I1_AllZeroBlocksAreExactlyZero) {
  Array x(DType::kF32, {2, 256});
  x.fill(0);
  x.set(3, -0.0);
  x.set(128 + 40, 1e-3);  // one non-zero in the second block
  const Quantized r = quantize(x);
  EXPECT_EQ(r.scale[0], 1);
  EXPECT_EQ(r.scale[2], 1);
  EXPECT_EQ(r.q.as<uint8_t>()[3], 0x80);  // -0 stays
  for (int64_t c = 0; c < 256; ++c) {
    EXPECT_EQ(dequantized(r, 0, c) != 0, c == 168);
    EXPECT_EQ(dequantized(r, 1, c), 0);
  }
  EXPECT_EQ(r.q[168], 448);
}

TEST(ReferenceQuantizeRows, I2_SubnormalBlocksGiveNoInfinityOrNan) {
  for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
    for (const float amax : {1e-30f, 0x1p-126f, 1e-38f, 1.4e-45f}) {
      Array x(DType::kF32, {1, 10});
      x.fill(amax / 4);
      x.set(7, -amax);
      const Quantized r = quantize(x, rounding);
      for (int64_t c = 0; c < 10; ++c) {
        // Within FP8's relative error, or flushed by half a subnormal step of the smallest scale.
        EXPECT_NEAR(dequantized(r, 0, c), x[c], std::max(std::abs(x[c]) * 0x1p-3, 0x1p-136));
      }
    }
  }
}

TEST(ReferenceQuantizeRows, I3_HugeValuesStayFinite) {
  for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
    Array x(DType::kF32, {1, 3});
    x.set(0, 3e38);
    x.set(1, -3e38);
    x.set(2, std::numeric_limits<float>::max());
    const Quantized r = quantize(x, rounding);
    EXPECT_TRUE(all_finite(r.q));
    for (int64_t c = 0; c < 3; ++c) {
      EXPECT_NEAR(dequantized(r, 0, c), x[c], std::abs(x[c]) * 0x1p-4);
    }
  }
}

TEST(ReferenceQuantizeRows, NonFiniteValuesStoreNanAndTouchNothingElse) {
  Rng rng(52);
  Array clean = normal(rng, DType::kF32, {1, 256});
  Array dirty = clean;
  const int64_t at[] = {0, 17, 127};
  const float bad[] = {kNan, kInf, -kInf};
  for (int i = 0; i < 3; ++i) {
    clean.set(at[i], 0);
    dirty.set(at[i], bad[i]);
  }
  const Quantized expected = quantize(clean), got = quantize(dirty);
  EXPECT_TRUE(got.scale.same_bits(expected.scale));
  for (int64_t c = 0; c < 256; ++c) {
    const bool replaced = c == 0 || c == 17 || c == 127;
    EXPECT_EQ(got.q.as<uint8_t>()[c], replaced ? 0x7F : expected.q.as<uint8_t>()[c]);
  }
  dirty.fill(kNan);
  EXPECT_EQ(quantize(dirty).scale[0], 1);  // no finite value at all
}

TEST(ReferenceQuantizeRows, I7_AnOutlierCostsOnlyItsOwnBlock) {
  Rng rng(53);
  Array x = normal(rng, DType::kF32, {1, 384});
  const Quantized before = quantize(x);
  x.set(200, 1e4);
  const Quantized after = quantize(x);
  for (int64_t c = 0; c < 384; ++c) {
    if (c / 128 == 1) continue;
    EXPECT_EQ(dequantized(after, 0, c), dequantized(before, 0, c));
  }
}

TEST(ReferenceQuantizeWeight, BothOrientationsHoldTheSameCodesAndScales) {
  Rng rng(54);
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{130, 257}, {128, 5}, {1, 300}}) {
    const Array w = normal(rng, DType::kBF16, {3, in, out});
    Array q(DType::kF8E4M3, {3, in, out}), q_t(DType::kF8E4M3, {3, out, in});
    Array scale(DType::kF32, {3, ceil_div(in, 128), ceil_div(out, 128)});
    Array scale_t(DType::kF32, {3, ceil_div(out, 128), ceil_div(in, 128)});
    EXPECT_OK(reference::quantize_weight({w, ScaleRounding::kFp32, q, q_t, scale, scale_t}));
    for (int64_t e = 0; e < 3; ++e) {
      for (int64_t i = 0; i < in; ++i) {
        for (int64_t j = 0; j < out; ++j) {
          const int64_t index = matrix_index(e, i, j, in, out);
          const int64_t index_t = matrix_index(e, j, i, out, in);
          const int64_t block = matrix_scale_index(e, i, j, in, out);
          ASSERT_EQ(q.as<uint8_t>()[index], q_t.as<uint8_t>()[index_t]);
          ASSERT_EQ(scale[block], scale_t[matrix_scale_index(e, j, i, out, in)]);
          const double bound =
              std::max(std::abs(w[index]) * 0x1p-4, scale[block] * 0x1p-10) * (1 + 0x1p-20);
          ASSERT_NEAR(q[index] * scale[block], w[index], bound);
        }
      }
    }
    // Each scale is that of its own 128x128 block, anchored at the matrix's corner.
    for (int64_t e = 0; e < 3; ++e) {
      for (int64_t i0 = 0; i0 < in; i0 += 128) {
        for (int64_t j0 = 0; j0 < out; j0 += 128) {
          float amax = 0;
          for (int64_t i = i0; i < std::min(in, i0 + 128); ++i) {
            for (int64_t j = j0; j < std::min(out, j0 + 128); ++j) {
              amax =
                  std::max(amax, static_cast<float>(std::abs(w[matrix_index(e, i, j, in, out)])));
            }
          }
          EXPECT_EQ(scale[matrix_scale_index(e, i0, j0, in, out)], amax / 448.0f);
        }
      }
    }
  }
}

TEST(ReferenceQuantizeWeight, I1_AWholeExpertOfZeros) {
  Rng rng(55);
  Array w = normal(rng, DType::kF32, {2, 140, 9});
  for (int64_t i = 0; i < 140 * 9; ++i) w.set(i, 0);
  Array q(DType::kF8E4M3, {2, 140, 9}), q_t(DType::kF8E4M3, {2, 9, 140});
  Array scale(DType::kF32, {2, 2, 1}), scale_t(DType::kF32, {2, 1, 2});
  EXPECT_OK(reference::quantize_weight({w, ScaleRounding::kPow2, q, q_t, scale, scale_t}));
  EXPECT_TRUE(rows_are_zero(q, 0, 1));
  EXPECT_TRUE(rows_are_zero(q_t, 0, 1));
  EXPECT_EQ(scale[0], 1);
  EXPECT_EQ(scale[1], 1);
}

}  // namespace
}  // namespace dropless
