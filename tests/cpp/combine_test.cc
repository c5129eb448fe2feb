// Row moves (permute, combine, their gradients, group sums): the reference against its definition
// by loops over slots, the CPU version against the reference.
#include "dropless/combine.h"

#include <gtest/gtest.h>

#include <tuple>

#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/executors.h"
#include "tests/cpp/support/groups.h"

namespace dropless {
namespace {

using namespace dropless::testing;

using Param = std::tuple<Groups, DType, int64_t /* H */>;

std::string param_name(const ::testing::TestParamInfo<Param>& info) {
  const auto& [groups, dtype, width] = info.param;
  return groups.name + "_" + name_of(dtype) + "_h" + std::to_string(width);
}

class RowMoves : public ::testing::TestWithParam<Param> {
 protected:
  static constexpr int64_t kPerToken = 3;

  RowMoves()
      : groups(std::get<0>(GetParam())),
        dtype(std::get<1>(GetParam())),
        width(std::get<2>(GetParam())),
        routed(routed_rows(groups, kPerToken, rng)),
        rows(groups.rows()) {}

  Array token_rows(DType type) { return normal(rng, type, {routed.tokens, width}); }
  Array expert_rows(DType type) { return normal(rng, type, {rows, width}); }
  Array slots() { return normal(rng, DType::kF32, {routed.tokens, kPerToken}); }
  int32_t row_of(int64_t slot) const { return routed.row_of_slot.as<int32_t>()[slot]; }
  int32_t slot_of(int64_t row) const { return routed.slot_of_row.as<int32_t>()[row]; }

  // fp32 sums of K terms, fp32 dot products over H.
  Bound sum_bound(DType out) const { return rounded_to(out) + fp32_sum(kPerToken); }

  Rng rng{41};
  Groups groups;
  DType dtype;
  int64_t width;
  RoutedRows routed;
  int64_t rows;
};

TEST_P(RowMoves, PermuteCopiesTokensAndClearsRowsWithoutSlot) {
  const Array x = token_rows(dtype);
  Array expected(dtype, {rows, width}), naive(dtype, {rows, width});
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < width; ++i) {
      const int32_t slot = slot_of(row);
      naive.set(row * width + i, slot < 0 ? 0 : x[slot / kPerToken * width + i]);
    }
  }
  PermuteArgs args;
  args.x = x;
  args.slot_of_row = routed.slot_of_row;
  args.experts_per_token = kPerToken;
  args.rows = expected;
  ASSERT_TRUE(reference::permute(args).ok());
  EXPECT_TRUE(expected.same_bits(naive));
  for_each_executor([&](Executor& executor) {
    Array got(dtype, {rows, width});
    args.rows = got;
    ASSERT_TRUE(cpu::permute(args, executor).ok());
    EXPECT_TRUE(got.same_bits(expected));
  });
}

TEST_P(RowMoves, CombineSumsInFp32AndRoundsOnce) {
  Array x = expert_rows(dtype);
  for (int64_t row = 0; row < rows; ++row) {
    // a1: what no slot points at must not be read.
    for (int64_t i = 0; slot_of(row) < 0 && i < width; ++i) x.set(row * width + i, NAN);
  }
  Array weights = slots();
  for (int64_t s = 0; s < weights.size(); ++s) {
    if (row_of(s) < 0) weights.set(s, NAN);
  }
  for (const bool weighted : {true, false}) {
    const Array none;
    const Array& w = weighted ? weights : none;
    for (const DType out_type : {DType::kF32, DType::kBF16}) {
      Array naive(DType::kF32, {routed.tokens, width}), expected(out_type, {routed.tokens, width});
      for (int64_t i = 0; i < naive.size(); ++i) {
        double sum = 0;
        for (int64_t s = i / width * kPerToken; s < (i / width + 1) * kPerToken; ++s) {
          if (row_of(s) >= 0) sum += (weighted ? weights[s] : 1) * x[row_of(s) * width + i % width];
        }
        naive.set(i, sum);
      }
      ASSERT_TRUE(reference::combine({x, routed.row_of_slot, w, expected}).ok());
      EXPECT_TRUE(close(expected, naive, rounded_to(out_type)));
      Array first;
      for_each_executor([&](Executor& executor) {
        Array got(out_type, {routed.tokens, width});
        ASSERT_TRUE(cpu::combine({x, routed.row_of_slot, w, got}, executor).ok());
        EXPECT_TRUE(close(got, naive, sum_bound(out_type)));
        if (first.dims().empty()) first = got;
        EXPECT_TRUE(got.same_bits(first));
      });
    }
  }
}

TEST_P(RowMoves, A4_CombineBackwardAgainstDefinition) {
  const Array weights = slots();
  for (const DType dy_type : {DType::kF32, DType::kBF16}) {
    const Array dy = token_rows(dy_type), x = expert_rows(dtype);
    Array d_rows(dtype, {rows, width}), d_weights(DType::kF32, {routed.tokens, kPerToken});
    Array naive_rows(DType::kF32, {rows, width}), naive_weights = d_weights;
    for (int64_t i = 0; i < naive_rows.size(); ++i) {
      const int32_t slot = slot_of(i / width);
      naive_rows.set(i, slot < 0 ? 0 : weights[slot] * dy[slot / kPerToken * width + i % width]);
    }
    for (int64_t s = 0; s < naive_weights.size(); ++s) {
      double dot = 0;
      for (int64_t i = 0; row_of(s) >= 0 && i < width; ++i) {
        dot += dy[s / kPerToken * width + i] * x[row_of(s) * width + i];
      }
      naive_weights.set(s, dot);
    }
    const auto args = [&](const Array& rows_out, const Array& weights_out) {
      return CombineBackwardArgs{dy,      x,        routed.row_of_slot, routed.slot_of_row,
                                 weights, rows_out, weights_out};
    };
    ASSERT_TRUE(reference::combine_backward(args(d_rows, d_weights)).ok());
    EXPECT_TRUE(close(d_rows, naive_rows, rounded_to(dtype)));
    EXPECT_TRUE(close(d_weights, naive_weights, rounded_to(DType::kF32)));
    Array first_rows, first_weights;
    for_each_executor([&](Executor& executor) {
      Array got_rows(dtype, {rows, width}), got_weights(DType::kF32, {routed.tokens, kPerToken});
      ASSERT_TRUE(cpu::combine_backward(args(got_rows, got_weights), executor).ok());
      EXPECT_TRUE(close(got_rows, naive_rows, rounded_to(dtype)));
      EXPECT_TRUE(close(got_weights, naive_weights, rounded_to(DType::kF32) + fp32_sum(width)));
      if (first_rows.dims().empty()) {
        first_rows = got_rows;
        first_weights = got_weights;
      }
      EXPECT_TRUE(got_rows.same_bits(first_rows));
      EXPECT_TRUE(got_weights.same_bits(first_weights));
    });
  }
}

TEST_P(RowMoves, G3_GroupSumAgainstDefinition) {
  const int64_t num_experts = groups.num_experts();
  const Array weights = slots();
  for (const bool gather : {false, true}) {
    for (const bool weighted : {false, true}) {
      const Array x = normal(rng, dtype, {gather ? routed.tokens : rows, 2, width});
      Array naive(DType::kF32, {num_experts, 2, width}), expected = naive;
      const std::vector<int32_t> offsets = groups.offsets();
      for (int64_t i = 0; i < naive.size(); ++i) {
        const size_t e = static_cast<size_t>(i / (2 * width));
        double sum = 0;
        for (int32_t row = offsets[e]; row < offsets[e + 1]; ++row) {
          const int64_t source = gather ? slot_of(row) / kPerToken : row;
          sum += (weighted ? weights[slot_of(row)] : 1.0) * x[source * 2 * width + i % (2 * width)];
        }
        naive.set(i, sum);
      }
      const Array none;
      const auto args = [&](const Array& out) {
        return GroupSumArgs{
            x,  routed.slot_of_row, weighted ? weights : none, routed.offsets, gather, kPerToken,
            out};
      };
      ASSERT_TRUE(reference::group_sum(args(expected)).ok());
      EXPECT_TRUE(close(expected, naive, rounded_to(DType::kF32)));
      Array first;
      for_each_executor([&](Executor& executor) {
        Array got(DType::kF32, {num_experts, 2, width});
        ASSERT_TRUE(cpu::group_sum(args(got), executor).ok());
        EXPECT_TRUE(close(got, naive, rounded_to(DType::kF32) + fp32_sum(rows)));
        if (first.dims().empty()) first = got;
        EXPECT_TRUE(got.same_bits(first));
      });
      for (int64_t e = 0; e < num_experts; ++e) {
        if (groups.sizes[static_cast<size_t>(e)] == 0) {
          EXPECT_TRUE(rows_are_zero(first, e, e + 1));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(D8_AnyWidth, RowMoves,
                         ::testing::Combine(::testing::ValuesIn(adversarial_groups()),
                                            ::testing::Values(DType::kF32, DType::kBF16),
                                            ::testing::Values(1, 7, 64, 200)),
                         param_name);

TEST(Combine, E6_ManyChoicesAreSummedInFp32) {
  // bfloat16 holds 256 + 1 only if the sum is rounded once, at its end: 256 + 32 * 1 = 288.
  constexpr int64_t kChoices = 33;
  Array rows(DType::kBF16, {kChoices, 1});
  rows.fill(1);
  rows.set(0, 256);
  Array row_of_slot(DType::kI32, {1, kChoices});
  for (int32_t k = 0; k < kChoices; ++k) row_of_slot.set(k, k);
  Array out(DType::kBF16, {1, 1});
  ASSERT_TRUE(cpu::combine({rows, row_of_slot, Array(), out}, serial_executor()).ok());
  EXPECT_EQ(out[0], 288);
}

TEST(Combine, SeveralChunksOfRows) {
  // Rows of 24 KiB: several tokens a chunk, several chunks.
  Rng rng(43);
  const Groups groups{"many", {31, 0, 16}, 0, 3};
  const RoutedRows routed = routed_rows(groups, 2, rng);
  const Array x = normal(rng, DType::kF32, {groups.rows(), 6000});
  const Array weights = normal(rng, DType::kF32, {routed.tokens, 2});
  Array expected(DType::kF32, {routed.tokens, 6000});
  ASSERT_TRUE(reference::combine({x, routed.row_of_slot, weights, expected}).ok());
  for_each_executor([&](Executor& executor) {
    Array got(DType::kF32, {routed.tokens, 6000});
    ASSERT_TRUE(cpu::combine({x, routed.row_of_slot, weights, got}, executor).ok());
    EXPECT_TRUE(close(got, expected, rounded_to(DType::kF32) + fp32_sum(2)));
  });
}

TEST(GroupSum, LongGroupsAreSummedInPieces) {
  Rng rng(44);
  const Groups groups{"long", {1000, 1, 257}};
  const Array x = normal(rng, DType::kBF16, {groups.rows(), 1, 19});
  Array expected(DType::kF32, {3, 1, 19}), first;
  const Array offsets = ints(groups.offsets());
  ASSERT_TRUE(reference::group_sum({x, {}, {}, offsets, false, 1, expected}).ok());
  for_each_executor([&](Executor& executor) {
    Array got(DType::kF32, {3, 1, 19});
    ASSERT_TRUE(cpu::group_sum({x, {}, {}, offsets, false, 1, got}, executor).ok());
    EXPECT_TRUE(close(got, expected, rounded_to(DType::kF32) + fp32_sum(1000)));
    if (first.dims().empty()) first = got;
    EXPECT_TRUE(got.same_bits(first));
  });
}

}  // namespace
}  // namespace dropless
