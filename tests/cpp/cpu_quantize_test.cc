#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "dropless/quantize.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/cpu_kernels.h"

namespace dropless::testing {
namespace {

class CpuQuantize : public CpuKernelTest {};

// Values that have broken quantisers: zeros of both signs, subnormals, huge ones, non-finite ones,
// and the halfway points between codes.
double special_value(int64_t i) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double values[] = {0.0,     -0.0, 1e-30,  1.4e-45, -1e-38,  0x1p-126, 3e38,  -3e38, 448.0,
                           -464.0,  kInf, -kInf,  NAN,     1e4,     17.0,     18.0,  20.0,  0x1p-7,
                           0x1p-10, 3e-3, -500.0, 0.4375,  0.46875, 448.5,    416.0, 432.0};
  return values[i % std::size(values)];
}

void expect_same_as_reference(const Array& x, ScaleRounding rounding, Executor& pool) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const auto run = [&](auto&& op) {
    std::pair<Array, Array> out(Array(DType::kF8E4M3, {rows, cols}),
                                Array(DType::kF32, {rows, ceil_div(cols, kScaleBlock)}));
    EXPECT_OK(op(QuantizeRowsArgs{x, rounding, out.first, out.second}));
    return out;
  };
  const auto expected = run([](const auto& a) { return reference::quantize_rows(a); });
  const auto got = run([&](const auto& a) { return cpu::quantize_rows(a, pool); });
  EXPECT_TRUE(got.first.same_bits(expected.first)) << "codes " << x.shape();
  EXPECT_TRUE(got.second.same_bits(expected.second)) << "scales " << x.shape();
}

TEST_P(CpuQuantize, i1_i2_i3_i4_rows_have_the_references_bits) {
  Rng rng(1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
      for (const int64_t cols : {1, 15, 16, 17, 127, 128, 129, 300}) {
        Array x = normal(rng, dtype, {37, cols});
        expect_same_as_reference(x, rounding, pool());
        for (int64_t i = 0; i < x.size(); i += 5) x.set(i, special_value(i / 5));
        expect_same_as_reference(x, rounding, pool());
        for (int64_t i = 0; i < x.size(); ++i) x.set(i, x[i] * std::ldexp(1.0, -130 + i % 260));
        expect_same_as_reference(x, rounding, pool());
        x.fill(-0.0);
        expect_same_as_reference(x, rounding, pool());
      }
    }
  }
}

// Every float between two neighbouring codes rounds as the scalar rules say; scale 1 by an all-448
// block.
TEST_P(CpuQuantize, every_code_and_every_boundary) {
  Array x(DType::kF32, {256 * 3, 2});
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<uint8_t>(code));
    const float next = decode_e4m3(static_cast<uint8_t>((code & 0x7f) == 0x7e ? code : code + 1));
    const float middle = (value + next) / 2;
    x.set((code * 3 + 0) * 2, middle);
    x.set((code * 3 + 1) * 2, std::nextafter(middle, -1000.0f));
    x.set((code * 3 + 2) * 2, std::nextafter(middle, 1000.0f));
  }
  for (int64_t row = 0; row < x.dim(0); ++row) x.set(row * 2 + 1, 448.0);
  expect_same_as_reference(x, ScaleRounding::kFp32, pool());
}

TEST_P(CpuQuantize, i1_weights_have_the_references_bits_in_both_orientations) {
  Rng rng(2);
  for (const auto& [in, out] :
       {std::pair<int64_t, int64_t>{1, 1}, {128, 128}, {129, 127}, {40, 300}, {260, 70}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Array w = normal(rng, dtype, {3, in, out});
      for (int64_t i = 0; i < in * out; ++i) w.set(in * out + i, 0.0);  // a whole expert of zeros
      for (int64_t i = 0; i < in * out; i += 7) w.set(i, special_value(i / 7));
      const int64_t ib = ceil_div(in, kScaleBlock), ob = ceil_div(out, kScaleBlock);
      struct Out {
        Array q, q_t, scale, scale_t;
      };
      const auto make = [&] {
        return Out{Array(DType::kF8E4M3, {3, in, out}), Array(DType::kF8E4M3, {3, out, in}),
                   Array(DType::kF32, {3, ib, ob}), Array(DType::kF32, {3, ob, ib})};
      };
      for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
        const Out got = make(), expected = make();
        const auto args = [&](const Out& o) {
          return QuantizeWeightArgs{w, rounding, o.q, o.q_t, o.scale, o.scale_t};
        };
        EXPECT_OK(cpu::quantize_weight(args(got), pool()));
        EXPECT_OK(reference::quantize_weight(args(expected)));
        EXPECT_TRUE(got.q.same_bits(expected.q)) << w.shape();
        EXPECT_TRUE(got.q_t.same_bits(expected.q_t)) << w.shape();
        EXPECT_TRUE(got.scale.same_bits(expected.scale) && got.scale_t.same_bits(expected.scale_t));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuQuantize, ::testing::ValuesIn(available_kernel_names()),
                         kernel_of);

}  // namespace
}  // namespace dropless::testing
