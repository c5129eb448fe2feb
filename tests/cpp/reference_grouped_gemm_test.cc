// The reference grouped products against naive ones over dequantised copies.
#include <gtest/gtest.h>

#include <algorithm>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/groups.h"

namespace dropless {
namespace {

using namespace dropless::testing;

// Values of an array with one scale per 1x128 block of its last axis, or per 128x128 block of its
// last two axes. Without a scale, the values.
std::vector<double> dequantized(const Array& a, const Array& scale, int64_t row_block) {
  std::vector<double> v(static_cast<size_t>(a.size()));
  const int64_t cols = a.dims().back();
  const int64_t rows = a.dims().size() == 3 ? a.dim(1) : std::max<int64_t>(1, a.dim(0));
  for (int64_t i = 0; i < a.size(); ++i) {
    const int64_t col = i % cols, row = i / cols % rows, e = i / cols / rows;
    const int64_t row_blocks = ceil_div(rows, row_block), col_blocks = ceil_div(cols, 128);
    const double s = scale.view().given()
                         ? scale[(e * row_blocks + row / row_block) * col_blocks + col / 128]
                         : 1.0;
    v[static_cast<size_t>(i)] = a[i] * s;
  }
  return v;
}

class GroupedGemm : public ::testing::TestWithParam<Groups> {};

TEST_P(GroupedGemm, D9_MatchesNaiveProductAndTailIsZero) {
  Rng rng(61);
  const Groups groups = GetParam();
  const int64_t rows = groups.rows(), experts = groups.num_experts();
  const std::vector<int32_t> offsets = groups.offsets();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    for (const bool transposed : {false, true}) {
      for (const bool biased : {false, true}) {
        // Two scale blocks along the contraction and along N, neither full.
        const int64_t depth = dtype == DType::kF8E4M3 ? 150 : 11;
        const int64_t cols = dtype == DType::kF8E4M3 && rows < 100 ? 131 : 6;
        Array lhs = normal(rng, dtype, {rows, depth});
        for (int64_t i = 0; i < rows * depth; ++i) {
          const int64_t row = i / depth;  // a1: rows of no group must not be read
          if (row < offsets.front() || row >= offsets.back()) lhs.set(i, NAN);
        }
        const Array rhs = transposed ? normal(rng, dtype, {experts, cols, depth})
                                     : normal(rng, dtype, {experts, depth, cols});
        Array lhs_scale, rhs_scale, bias;
        if (dtype == DType::kF8E4M3) {
          lhs_scale = Array(DType::kF32, {rows, ceil_div(depth, 128)}).fill_uniform(rng, 0.5, 2);
          rhs_scale =
              Array(DType::kF32, {experts, ceil_div(rhs.dim(1), 128), ceil_div(rhs.dim(2), 128)});
          rhs_scale.fill_uniform(rng, 0.5, 2);
        }
        if (biased) bias = normal(rng, DType::kF32, {experts, cols});
        Array naive(DType::kF32, {rows, cols}), got(DType::kF32, {rows, cols});
        naive.fill(0);
        const std::vector<double> a = dequantized(lhs, lhs_scale, 1);
        const std::vector<double> b = dequantized(rhs, rhs_scale, 128);
        for (int64_t e = 0; e < experts; ++e) {
          for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
            for (int64_t n = 0; n < cols; ++n) {
              double sum = biased ? bias[e * cols + n] : 0;
              for (int64_t k = 0; k < depth; ++k) {
                const int64_t at =
                    transposed ? (e * cols + n) * depth + k : (e * depth + k) * cols + n;
                sum += a[r * depth + k] * b[at];
              }
              naive.set(r * cols + n, sum);
            }
          }
        }
        EXPECT_OK(reference::grouped_gemm(
            {lhs, lhs_scale, rhs, rhs_scale, bias, ints(offsets), transposed, got}));
        EXPECT_TRUE(close(got, naive, rounded_to(DType::kF32), offsets)) << name_of(dtype);
        EXPECT_TRUE(rows_are_zero(got, 0, offsets.front()));
        EXPECT_TRUE(rows_are_zero(got, offsets.back(), rows));
      }
    }
  }
}

class GroupedWgrad : public ::testing::TestWithParam<Groups> {};

TEST_P(GroupedWgrad, B1_MatchesNaiveSumAndEmptyExpertsAreZero) {
  Rng rng(62);
  const Groups groups = GetParam();
  const std::vector<int32_t> offsets = groups.offsets();
  constexpr int64_t kPerToken = 3, kKc = 5;
  const int64_t rows = groups.rows(), experts = groups.num_experts();
  const RoutedRows routed = routed_rows(groups, kPerToken, rng);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Gather gather : {Gather::kNone, Gather::kLhs, Gather::kRhs}) {
      for (const int64_t planes : {1, 2}) {
        const int64_t n = 4;
        Array x = normal(rng, dtype, {gather == Gather::kLhs ? routed.tokens : rows, kKc});
        Array dy = normal(rng, dtype, {gather == Gather::kRhs ? routed.tokens : rows, planes, n});
        // What lies outside every group must not be read: 0 * NaN is NaN.
        for (Array* a : {&x, &dy}) {
          const bool gathered = a == (gather == Gather::kLhs ? &x : &dy) && gather != Gather::kNone;
          const int64_t width = a->dim(0) == 0 ? 0 : a->size() / a->dim(0);
          for (int64_t i = 0; !gathered && i < a->size(); ++i) {
            if (i / width < offsets.front() || i / width >= offsets.back()) a->set(i, NAN);
          }
        }
        const auto source = [&](int64_t row, bool gathered) {
          return gathered ? routed.slot_of_row.as<int32_t>()[row] / kPerToken : row;
        };
        for (const bool accumulate : {false, true}) {
          GroupedWgradArgs args;
          args.x = x;
          args.dy = dy;
          if (gather != Gather::kNone) args.slot_of_row = routed.slot_of_row;
          args.offsets = routed.offsets;
          args.gather = gather;
          args.experts_per_token = kPerToken;
          args.accumulate = accumulate;
          Array got[2], naive[2];
          for (int64_t p = 0; p < planes; ++p) {
            got[p] = Array(DType::kF32, {experts, kKc, n});
            if (accumulate) got[p].fill_normal(rng);
            naive[p] = got[p];
            for (int64_t i = 0; i < naive[p].size(); ++i) {
              const int64_t e = i / (kKc * n), k = i / n % kKc, j = i % n;
              double sum = accumulate ? got[p][i] : 0;
              for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
                sum += x[source(r, gather == Gather::kLhs) * kKc + k] *
                       dy[(source(r, gather == Gather::kRhs) * planes + p) * n + j];
              }
              naive[p].set(i, sum);
            }
            args.dw[p] = got[p];
          }
          EXPECT_OK(reference::grouped_wgrad(args));
          for (int64_t p = 0; p < planes; ++p) {
            EXPECT_TRUE(close(got[p], naive[p], rounded_to(DType::kF32)));
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupedGemm, ::testing::ValuesIn(adversarial_groups()), group_name);
INSTANTIATE_TEST_SUITE_P(All, GroupedWgrad, ::testing::ValuesIn(adversarial_groups()), group_name);

// One column of each operand with fp32 arithmetic by hand: blocks of 128 rows x 1 column, counted
// from the expert's first row, quantised and multiplied.
TEST(GroupedWgradFp8, BlocksAreCountedFromEachExpertsFirstRow) {
  Rng rng(63);
  const std::vector<int32_t> offsets = {3, 40, 40, 300};  // 37, 0 and 128 + 128 + 4 rows
  const Array x = normal(rng, DType::kBF16, {310, 2}), dy = normal(rng, DType::kBF16, {310, 1, 3});
  for (const ScaleRounding rounding : {ScaleRounding::kFp32, ScaleRounding::kPow2}) {
    GroupedWgradArgs args;
    args.x = x;
    args.dy = dy;
    const Array offsets_array = ints(offsets);
    args.offsets = offsets_array;
    args.fp8 = true;
    args.scale_rounding = rounding;
    Array got(DType::kF32, {3, 2, 3}), naive = got;
    args.dw[0] = got;
    EXPECT_OK(reference::grouped_wgrad(args));
    const auto quantized = [&](const Array& a, int64_t width, int64_t col, int64_t row, int64_t e) {
      const int64_t begin = offsets[e] + (row - offsets[e]) / 128 * 128;
      float amax = 0;
      for (int64_t r = begin; r < std::min<int64_t>(begin + 128, offsets[e + 1]); ++r) {
        amax = std::max(amax, std::abs(static_cast<float>(a[r * width + col])));
      }
      const float scale = block_scale(amax, rounding), inverse = 1.0f / scale;
      const float value = static_cast<float>(a[row * width + col]) * inverse;
      return static_cast<double>(decode_e4m3(encode_e4m3(value))) * scale;
    };
    for (int64_t i = 0; i < 18; ++i) {
      const int64_t e = i / 6, k = i / 3 % 2, j = i % 3;
      double sum = 0;
      for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
        sum += quantized(x, 2, k, r, e) * quantized(dy, 3, j, r, e);
      }
      naive.set(i, sum);
    }
    EXPECT_TRUE(close(got, naive, rounded_to(DType::kF32)));
    EXPECT_TRUE(rows_are_zero(got, 1, 2));
    // FP8 changed something, and not too much: 2^-4 relative at most in each factor.
    args.fp8 = false;
    Array exact(DType::kF32, {3, 2, 3});
    args.dw[0] = exact;
    EXPECT_OK(reference::grouped_wgrad(args));
    EXPECT_FALSE(got.same_bits(exact));
    EXPECT_TRUE(close(got, exact, rounded_summands(2 * 0x1p-4)));
  }
}

TEST(GroupedWgrad, E10_AccumulationInFloat32KeepsSmallTerms) {
  GroupedWgradArgs args;
  Array x(DType::kBF16, {1, 1}), dy(DType::kBF16, {1, 1, 1}), dw(DType::kF32, {1, 1, 1});
  x.fill(1);
  dy.fill(1);
  dw.fill(256);
  const Array offsets = ints({0, 1});
  args.x = x;
  args.dy = dy;
  args.offsets = offsets;
  args.accumulate = true;
  args.dw[0] = dw;
  EXPECT_OK(reference::grouped_wgrad(args));
  EXPECT_EQ(dw[0], 257);
}

TEST(GroupedGemm, OffsetsOutsideTheArrayAreCutNotFollowed) {
  Rng rng(64);
  const Array lhs = normal(rng, DType::kF32, {4, 2}), rhs = normal(rng, DType::kF32, {3, 2, 2});
  Array got(DType::kF32, {4, 2});
  EXPECT_OK(
      reference::grouped_gemm({lhs, {}, rhs, {}, {}, ints({-5, 2, 2000000000, 1}), false, got}));
  EXPECT_TRUE(all_finite(got));
}

}  // namespace
}  // namespace dropless
