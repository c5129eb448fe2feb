// The CPU router against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/executors.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void expect_same_routing(const Routing& got, const Routing& expected) {
  EXPECT_TRUE(got.ids.same_bits(expected.ids));
  EXPECT_TRUE(got.plan.same_bits(expected.plan));
  EXPECT_TRUE(got.counters.same_bits(expected.counters));
  EXPECT_TRUE(close(got.weights, expected.weights, router_bound(expected.num_experts())));
  EXPECT_TRUE(close(got.prob_sum, expected.prob_sum, router_bound(expected.num_experts())));
  EXPECT_TRUE(close(got.sums, expected.sums, router_bound(expected.num_experts())));
}

class CpuRoute : public ::testing::TestWithParam<RouterOptions> {
 protected:
  static std::vector<Routing> cases() { return routing_cases(GetParam()); }
};

TEST_P(CpuRoute, ForwardMatchesReferenceWithTheSameBitsOnAnyExecutor) {
  for (Routing& expected : cases()) {
    SCOPED_TRACE(expected.logits.shape());
    const Routing poisoned = expected;
    ASSERT_TRUE(reference::route(expected.forward()).ok());
    Routing first = poisoned;
    ASSERT_TRUE(cpu::route(first.forward(), serial_executor()).ok());
    expect_same_routing(first, expected);
    for_each_executor([&](Executor& executor) {
      Routing again = poisoned;
      ASSERT_TRUE(cpu::route(again.forward(), executor).ok());
      EXPECT_TRUE(again.ids.same_bits(first.ids));
      EXPECT_TRUE(again.weights.same_bits(first.weights));
      EXPECT_TRUE(again.prob_sum.same_bits(first.prob_sum));
      EXPECT_TRUE(again.sums.same_bits(first.sums));
      EXPECT_TRUE(again.plan.same_bits(first.plan));
    });
  }
}

TEST_P(CpuRoute, BackwardMatchesReferenceWithTheSameBitsOnAnyExecutor) {
  for (Routing& r : cases()) {
    if (r.options.num_groups > 1) continue;  // groups change the ids alone
    SCOPED_TRACE(r.logits.shape());
    ASSERT_TRUE(reference::route(r.forward()).ok());
    for (const bool statistics : {true, false}) {
      if (!statistics) {
        r.d_prob_sum.fill(0);
        r.d_sums.fill(0);
      }
      Routing expected = r, first = r;
      ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
      ASSERT_TRUE(cpu::route_backward(first.backward(), serial_executor()).ok());
      // The gradient of a softmax is a difference of sums over E terms.
      const Bound bound = router_bound(4 * r.num_experts()) + Bound{0, 32 * 0x1p-24};
      // With one expert every softmax is 1 and its gradient 0 but for rounding.
      if (r.num_experts() > 1) {
        EXPECT_TRUE(close(first.d_logits, expected.d_logits, bound));
      }
      EXPECT_TRUE(all_finite(first.d_logits));
      for_each_executor([&](Executor& executor) {
        Routing again = r;
        ASSERT_TRUE(cpu::route_backward(again.backward(), executor).ok());
        EXPECT_TRUE(again.d_logits.same_bits(first.d_logits));
      });
    }
  }
}

TEST_P(CpuRoute, F1_SameIdsAsReferenceForLogitsThatAreNotFinite) {
  Rng rng(22);
  const float special[] = {kNan, -kNan, kInf, -kInf, 0.0f, -0.0f, 1.0f};
  Routing expected(200, 19, 6);
  expected.options = GetParam();
  for (int64_t i = 0; i < expected.logits.size(); ++i) {
    expected.logits.set(i, special[rng() % (i / 19 % 2 == 0 ? 7 : 4)]);
  }
  // A NaN with every payload bit set, as poisoned memory holds.
  expected.logits.as<uint32_t>()[3] = 0xFFFFFFFFu;
  for (const bool biased : {false, true}) {
    if (biased) expected.selection_bias = normal(rng, DType::kF32, {19});
    Routing got = expected;
    ASSERT_TRUE(reference::route(expected.forward()).ok());
    ASSERT_TRUE(cpu::route(got.forward(), serial_executor()).ok());
    EXPECT_TRUE(got.ids.same_bits(expected.ids));
    EXPECT_TRUE(got.plan.same_bits(expected.plan));
    EXPECT_TRUE(got.counters.same_bits(expected.counters));
    for (int64_t i = 0; i < got.weights.size(); ++i) {
      EXPECT_EQ(std::isnan(got.weights[i]), std::isnan(expected.weights[i])) << "slot " << i;
    }
    ASSERT_TRUE(cpu::route_backward(got.backward(), serial_executor()).ok());
  }
}

TEST_P(CpuRoute, F1_TiesTakeTheLowestIndex) {
  Rng rng(23);
  Routing expected(300, 33, 7, DType::kBF16);
  expected.options = GetParam();
  for (int64_t i = 0; i < expected.logits.size(); ++i) {
    expected.logits.set(i, static_cast<double>(rng() % 4));
  }
  Routing got = expected;
  ASSERT_TRUE(reference::route(expected.forward()).ok());
  ASSERT_TRUE(cpu::route(got.forward(), serial_executor()).ok());
  EXPECT_TRUE(got.ids.same_bits(expected.ids));
}

INSTANTIATE_TEST_SUITE_P(All, CpuRoute, ::testing::ValuesIn(all_router_options()));

TEST(CpuRouteEdges, F7_EveryCombinationMatchesReference) {
  for (Routing& expected : every_combination()) {
    Routing got = expected;
    ASSERT_TRUE(reference::route(expected.forward()).ok());
    ASSERT_TRUE(cpu::route(got.forward(), serial_executor()).ok());
    expect_same_routing(got, expected);
    ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
    ASSERT_TRUE(cpu::route_backward(got.backward(), serial_executor()).ok());
    EXPECT_TRUE(close(got.d_logits, expected.d_logits,
                      router_bound(4 * expected.num_experts()) + Bound{0, 32 * 0x1p-24}));
  }
}

TEST(CpuRouteEdges, ScoresThatUnderflowKeepWeightsStatisticsAndGradients) {
  for (const RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (Routing& expected : underflow_cases(score)) {
      SCOPED_TRACE(expected.logits[2]);
      Routing got = expected;
      ASSERT_TRUE(reference::route(expected.forward()).ok());
      ASSERT_TRUE(cpu::route(got.forward(), serial_executor()).ok());
      expect_same_routing(got, expected);
      ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
      ASSERT_TRUE(cpu::route_backward(got.backward(), serial_executor()).ok());
      EXPECT_TRUE(
          close(got.d_logits, expected.d_logits, router_bound(4 * 6) + Bound{0, 32 * 0x1p-24}));
    }
  }
}

TEST(CpuRouteEdges, SharpLogitsKeepTheirGradients) {
  // 1 - score is 1e-9 here: a subtraction in fp32 would give 0.
  Routing expected(1, 3, 2);
  expected.options = {RouterScore::kSigmoid, true, false, 0.0f, 1.0f};
  for (int64_t e = 0; e < 3; ++e) expected.logits.set(e, 20.0 + static_cast<double>(e));
  expected.d_weights.fill(1.0);
  expected.d_prob_sum.fill(0);
  expected.d_sums.fill(0);
  Routing got = expected;
  ASSERT_TRUE(reference::route(expected.forward()).ok());
  ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
  got.ids = expected.ids;
  ASSERT_TRUE(cpu::route_backward(got.backward(), serial_executor()).ok());
  EXPECT_GT(expected.d_logits[2], 0);
  EXPECT_TRUE(close(got.d_logits, expected.d_logits, Bound{16 * 0x1p-24, 0}));
}

TEST(CpuRouteEdges, H1_PaddingChangesNothing) {
  Rng rng(25);
  Routing plain(40, 7, 2), padded(160, 7, 2);
  plain.randomize(rng);
  padded.mask = Array(DType::kU8, {160}).fill(0);
  padded.logits.poison();  // NaN
  padded.d_weights.poison();
  padded.d_prob_sum = plain.d_prob_sum;
  padded.d_sums = plain.d_sums;
  // Real tokens come in runs at both ends, so that the chunks differ from those of the plain batch.
  std::vector<int64_t> place;
  for (int64_t t = 0; t < 40; ++t) place.push_back(t < 25 ? t : 120 + t);
  for (int64_t t = 0; t < 40; ++t) {
    padded.mask.set(place[t], 1);
    for (int64_t e = 0; e < 7; ++e) padded.logits.set(place[t] * 7 + e, plain.logits[t * 7 + e]);
    for (int64_t k = 0; k < 2; ++k)
      padded.d_weights.set(place[t] * 2 + k, plain.d_weights[t * 2 + k]);
  }
  for (Routing* r : {&plain, &padded}) {
    ASSERT_TRUE(cpu::route(r->forward(), serial_executor()).ok());
    ASSERT_TRUE(cpu::route_backward(r->backward(), serial_executor()).ok());
  }
  EXPECT_TRUE(close(padded.prob_sum, plain.prob_sum, router_bound(40)));
  EXPECT_TRUE(close(padded.sums, plain.sums, router_bound(40)));
  EXPECT_TRUE(padded.counters.same_bits(plain.counters));
  EXPECT_TRUE(padded.plan.counts.same_bits(plain.plan.counts));
  std::vector<bool> real(160, false);
  for (int64_t t = 0; t < 40; ++t) {
    real[static_cast<size_t>(place[t])] = true;
    for (int64_t e = 0; e < 7; ++e) {
      EXPECT_EQ(padded.d_logits[place[t] * 7 + e], plain.d_logits[t * 7 + e]);
    }
  }
  for (int64_t t = 0; t < 160; ++t) {
    if (!real[static_cast<size_t>(t)]) {
      EXPECT_TRUE(rows_are_zero(padded.d_logits, t, t + 1));
    }
  }
}

}  // namespace
}  // namespace dropless
