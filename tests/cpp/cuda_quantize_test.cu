// The quantisers on the GPU: the same bytes as the reference's, whatever the input.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "dropless/quantize.h"
#include "tests/cpp/support/device.h"

namespace dropless::testing {
namespace {

using CudaQuantize = GpuTest<>;

// Values that have broken quantisers: zeros of both signs, subnormals, huge ones, non-finite ones,
// and the halfway points between codes.
double special_value(int64_t i) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double values[] = {0.0,    -0.0,    1e-30,  1.4e-45,   -1e-38,     0x1p-126, 3e38,
                           -3e38,  448.0,   -464.0, kInfinity, -kInfinity, NAN,      1e4,
                           17.0,   18.0,    20.0,   0x1p-7,    0x1p-10,    3e-3,     -500.0,
                           0.4375, 0.46875, 448.5,  416.0,     432.0};
  return values[i % static_cast<int64_t>(std::size(values))];
}

void expect_rows(const Array& x, ScaleRounding rounding) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const auto make = [&] {
    return std::pair<Array, Array>(Array(DType::kF8E4M3, {rows, cols}),
                                   Array(DType::kF32, {rows, ceil_div(cols, kScaleBlock)}));
  };
  const auto expected = make();
  EXPECT_OK(reference::quantize_rows({x, rounding, expected.first, expected.second}));
  for (const int64_t misalignment : {0, 4}) {
    const auto got = make();
    Device device(misalignment);
    EXPECT_OK(cuda::quantize_rows(
        {device.put(x), rounding, device.put(got.first), device.put(got.second)}, {},
        device.stream()));
    device.finish();
    EXPECT_TRUE(got.first.same_bits(expected.first)) << "codes " << x.shape();
    EXPECT_TRUE(got.second.same_bits(expected.second)) << "scales " << x.shape();
  }
}

TEST_F(CudaQuantize, I1_I2_I3_I4_RowsHaveTheReferencesBits) {
  Rng rng(61);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
      for (const int64_t cols : {0, 1, 15, 16, 17, 24, 72, 127, 128, 129, 300, 2880}) {
        Array x = normal(rng, dtype, {37, cols});
        expect_rows(x, rounding);
        for (int64_t i = 0; i < x.size(); i += 5) x.set(i, special_value(i / 5));
        expect_rows(x, rounding);
        for (int64_t i = 0; i < x.size(); ++i) {
          x.set(i, x[i] * std::ldexp(1.0, static_cast<int>(-130 + i % 260)));
        }
        expect_rows(x, rounding);
        x.fill(-0.0);
        expect_rows(x, rounding);
      }
    }
  }
}

TEST_F(CudaQuantize, EveryCodeAndEveryBoundary) {
  // Eight columns take the kernel of packs, three the other one. The 448 makes the scale 1.
  for (const int64_t cols : {3, 8}) {
    Array x(DType::kF32, {256 * 3, cols});
    x.fill(448.0);
    for (int code = 0; code < 256; ++code) {
      const float value = decode_e4m3(static_cast<uint8_t>(code));
      const float next = decode_e4m3(static_cast<uint8_t>((code & 0x7f) == 0x7e ? code : code + 1));
      const float middle = (value + next) / 2;
      x.set((code * 3 + 0) * cols, middle);
      x.set((code * 3 + 1) * cols, std::nextafter(middle, -1000.0f));
      x.set((code * 3 + 2) * cols, std::nextafter(middle, 1000.0f));
    }
    expect_rows(x, ScaleRounding::kFp32);
  }
}

TEST_F(CudaQuantize, I4_PowersOfTwoAndTheirNeighbours) {
  Array x(DType::kF32, {251 * 3, 8});
  for (int64_t row = 0; row < x.dim(0); ++row) {
    const float largest = std::ldexp(448.0f, static_cast<int>(row / 3 - 130));
    const float values[] = {largest, std::nextafter(largest, 0.0f), std::nextafter(largest, 1e38f)};
    for (int64_t c = 0; c < 8; ++c) x.set(row * 8 + c, values[row % 3] * (c % 2 == 0 ? 1 : -0.3));
  }
  for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
    expect_rows(x, rounding);
  }
}

TEST_F(CudaQuantize, I1_WeightsHaveTheReferencesBitsInBothOrientations) {
  Rng rng(62);
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 1},
                                {128, 128},
                                {129, 127},
                                {40, 300},
                                {260, 72},
                                {132, 264},
                                {64, 1408}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Array w = normal(rng, dtype, {3, in, out});
      for (int64_t i = 0; i < in * out; ++i) w.set(in * out + i, 0.0);  // a whole expert of zeros
      for (int64_t i = 0; i < in * out; i += 7) w.set(i, special_value(i / 7));
      const int64_t in_blocks = ceil_div(in, kScaleBlock), out_blocks = ceil_div(out, kScaleBlock);
      struct Out {
        Array q, q_t, scale, scale_t;
      };
      const auto make = [&] {
        return Out{Array(DType::kF8E4M3, {3, in, out}), Array(DType::kF8E4M3, {3, out, in}),
                   Array(DType::kF32, {3, in_blocks, out_blocks}),
                   Array(DType::kF32, {3, out_blocks, in_blocks})};
      };
      for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
        const Out expected = make();
        EXPECT_OK(reference::quantize_weight(
            {w, rounding, expected.q, expected.q_t, expected.scale, expected.scale_t}));
        for (const int64_t misalignment : {0, 4}) {
          const Out got = make();
          Device device(misalignment);
          EXPECT_OK(cuda::quantize_weight(
              {device.put(w), rounding, device.put(got.q), device.put(got.q_t),
               device.put(got.scale), device.put(got.scale_t)},
              {}, device.stream()));
          device.finish();
          EXPECT_TRUE(got.q.same_bits(expected.q)) << w.shape();
          EXPECT_TRUE(got.q_t.same_bits(expected.q_t)) << w.shape();
          EXPECT_TRUE(got.scale.same_bits(expected.scale)) << w.shape();
          EXPECT_TRUE(got.scale_t.same_bits(expected.scale_t)) << w.shape();
        }
      }
    }
  }
}

TEST_F(CudaQuantize, J9_CapturedGraphsReplayTheSameBits) {
  Rng rng(63);
  const Array x = normal(rng, DType::kBF16, {50, 384});
  Array expected_q(DType::kF8E4M3, {50, 384}), expected_scale(DType::kF32, {50, 3});
  EXPECT_OK(reference::quantize_rows({x, ScaleRounding::kFp32, expected_q, expected_scale}));
  Array q(DType::kF8E4M3, {50, 384}), scale(DType::kF32, {50, 3});
  Device device;
  const QuantizeRowsArgs args = {device.put(x), ScaleRounding::kFp32, device.put(q),
                                 device.put(scale)};
  replay(device, 3, [&](cuda::Stream s) { EXPECT_OK(cuda::quantize_rows(args, {}, s)); });
  device.finish();
  EXPECT_TRUE(q.same_bits(expected_q));
  EXPECT_TRUE(scale.same_bits(expected_scale));
}

}  // namespace
}  // namespace dropless::testing
