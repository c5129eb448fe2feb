// The reference router against a naive computation and finite differences, both in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/naive_router.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless {
namespace {

using namespace dropless::testing;

class RouteOptions : public ::testing::TestWithParam<RouterOptions> {};

TEST_P(RouteOptions, F7_ForwardMatchesDefinition) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Rng rng(7);
    Routing r(11, 9, 4, dtype);
    r.options = GetParam();
    r.randomize(rng);
    r.add_mask();
    ASSERT_TRUE(reference::route(r.forward()).ok());
    std::vector<double> prob_sum(9, 0.0);
    double lse_squares = 0, entropies = 0;
    int real = 0;
    for (int64_t t = 0; t < r.tokens(); ++t) {
      const std::vector<double> z = row_of(r.logits, t);
      const std::vector<int> ids = naive_top_k(z, 4);
      const Naive naive = naive_router(r.options, z, ids);
      for (int64_t k = 0; k < 4; ++k) {
        EXPECT_EQ(r.ids[t * 4 + k], r.is_real(t) ? ids[k] : -1);
        const double expected = r.is_real(t) ? naive.weights[k] : 0;
        EXPECT_NEAR(r.weights[t * 4 + k], expected, 0x1p-23 * std::abs(expected));
      }
      if (!r.is_real(t)) continue;
      for (size_t e = 0; e < 9; ++e) prob_sum[e] += naive.prob[e];
      lse_squares += naive.lse_square;
      entropies += naive.entropy;
      ++real;
    }
    for (int64_t e = 0; e < 9; ++e) {
      EXPECT_NEAR(r.prob_sum[e], prob_sum[e], 0x1p-23 * prob_sum[e]);
    }
    EXPECT_NEAR(r.sums[0], lse_squares, 0x1p-23 * lse_squares);
    EXPECT_NEAR(r.sums[1], entropies, 0x1p-23 * entropies);
    EXPECT_EQ(r.counters[0], real);
    EXPECT_EQ(r.counters[1], 0);
  }
}

TEST(ReferenceRoute, F7_EveryCombinationMatchesDefinitionAndFiniteDifferences) {
  // Scores, orders, normalisations, scales, group rules, bias, dtypes.
  ASSERT_EQ(every_combination().size(), 4u * 2 * 4 * 2 * 4 * 2 * 2);
  for (Routing& r : every_combination()) {
    const int64_t num_experts = r.num_experts(), per_token = r.per_token();
    ASSERT_TRUE(reference::route(r.forward()).ok());
    ASSERT_TRUE(reference::route_backward(r.backward()).ok());
    for (int64_t t = 0; t < r.tokens(); ++t) {
      std::vector<double> z = row_of(r.logits, t);
      std::vector<int> slots, ids;
      if (r.is_real(t) && r.forced_ids[t * per_token] == kRouteFreely) {
        ids = naive_selection(r.options, z, r.selection_bias, per_token);
        slots = {0, 1, 2};
      } else if (r.is_real(t) && t == 6) {
        ids = {11, 0};
        slots = {0, 2};
      }
      for (int64_t k = 0; k < per_token; ++k) {
        const auto at = std::find(slots.begin(), slots.end(), static_cast<int>(k));
        const int expected = at == slots.end() ? -1 : ids[at - slots.begin()];
        ASSERT_EQ(r.ids[t * per_token + k], expected) << "token " << t << " choice " << k;
      }
      if (ids.empty()) {
        EXPECT_TRUE(rows_are_zero(r.d_logits, t, t + 1));
        continue;
      }
      const Naive naive = naive_router(r.options, z, ids);
      for (size_t i = 0; i < ids.size(); ++i) {
        EXPECT_NEAR(r.weights[t * per_token + slots[i]], naive.weights[i],
                    0x1p-23 * std::abs(naive.weights[i]));
      }
      const auto objective = [&] {
        const Naive n = naive_router(r.options, z, ids);
        double sum = r.d_sums[0] * n.lse_square + r.d_sums[1] * n.entropy;
        for (size_t i = 0; i < ids.size(); ++i) {
          sum += r.d_weights[t * per_token + slots[i]] * n.weights[i];
        }
        for (int64_t e = 0; e < num_experts; ++e) sum += r.d_prob_sum[e] * n.prob[e];
        return sum;
      };
      for (int64_t e = 0; e < num_experts; ++e) {
        // Central differences: the error is h^2 (1e-10) from the series and 1e-16 / h from
        // rounding.
        constexpr double kStep = 1e-5;
        const double at = z[e];
        z[e] = at + kStep;
        const double above = objective();
        z[e] = at - kStep;
        const double below = objective();
        z[e] = at;
        const double expected = (above - below) / (2 * kStep);
        EXPECT_NEAR(r.d_logits[t * num_experts + e], expected, 1e-7 + 0x1p-23 * std::abs(expected))
            << "token " << t << " expert " << e;
      }
    }
  }
}

TEST_P(RouteOptions, F5_GroupLimitedSelectionMatchesDefinition) {
  for (Routing& r : routing_cases(GetParam())) {
    if (r.options.num_groups == 1) continue;
    SCOPED_TRACE(r.logits.shape());
    ASSERT_TRUE(reference::route(r.forward()).ok());
    for (int64_t t = 0; t < r.tokens(); ++t) {
      const std::vector<int> expected =
          naive_selection(r.options, row_of(r.logits, t), r.selection_bias, r.per_token());
      for (int64_t k = 0; k < r.per_token(); ++k) {
        ASSERT_EQ(r.ids[t * r.per_token() + k], expected[k]) << "token " << t << " choice " << k;
      }
    }
  }
}

TEST_P(RouteOptions, ForcedIdsAreWeighedAndOthersChosen) {
  Rng rng(12);
  Routing r(5, 9, 3);
  r.options = GetParam();
  r.randomize(rng);
  r.forced_ids = Array(DType::kI32, {5, 3});
  // Given; a token that is free; repeated and out of range; padding; the last slot alone.
  const int forced[] = {7, 0, 4, kRouteFreely, 5, 5, 2, 2, 9, -1, -5, 9, -1, -1, 6};
  for (int64_t i = 0; i < 15; ++i) r.forced_ids.set(i, forced[i]);
  const std::vector<int> free = naive_top_k(row_of(r.logits, 1), 3);
  const std::vector<std::vector<int>> expected = {
      {7, 0, 4}, free, {2, -1, -1}, {-1, -1, -1}, {-1, -1, 6}};
  ASSERT_TRUE(reference::route(r.forward()).ok());
  ASSERT_TRUE(reference::route_backward(r.backward()).ok());
  for (int64_t t = 0; t < 5; ++t) {
    std::vector<int> valid;
    for (const int id : expected[t]) {
      if (id >= 0) valid.push_back(id);
    }
    const Naive naive = naive_router(r.options, row_of(r.logits, t), valid);
    size_t next = 0;
    for (int64_t k = 0; k < 3; ++k) {
      EXPECT_EQ(r.ids[t * 3 + k], expected[t][k]);
      const double weight = expected[t][k] < 0 ? 0.0 : naive.weights[next++];
      EXPECT_NEAR(r.weights[t * 3 + k], weight, 0x1p-23 * std::abs(weight));
    }
  }
  EXPECT_EQ(r.counters[0], 4);
  EXPECT_TRUE(rows_are_zero(r.d_logits, 3, 4));
  EXPECT_EQ(r.plan.offsets[9], 3 + 3 + 1 + 1);
}

INSTANTIATE_TEST_SUITE_P(All, RouteOptions, ::testing::ValuesIn(all_router_options()));

}  // namespace
}  // namespace dropless
