// The reference router where logits are not finite, equal, or far from zero, and with padding.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/naive_router.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(ReferenceRouteEdges, F1_TopKIsValidForAnyLogits) {
  const std::vector<std::vector<float>> rows = {
      {kNan, kNan, kNan, kNan, kNan},   {-kInf, -kInf, -kInf, -kInf, -kInf},
      {kInf, kInf, kInf, kInf, kInf},   {kNan, 1, -kInf, kInf, 1},
      {-kInf, kNan, -kInf, kNan, kNan}, {2, 2, 2, 2, 2},
      {-0.0f, 0.0f, -1, 0.0f, -0.0f},
  };
  const std::vector<std::vector<int>> expected = {
      {0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {3, 1, 4}, {0, 2, 1}, {0, 1, 2}, {0, 1, 3},
  };
  Routing r(7, 5, 3);
  int non_finite = 0;
  for (int64_t t = 0; t < 7; ++t) {
    for (int64_t e = 0; e < 5; ++e) {
      r.logits.set(t * 5 + e, rows[t][e]);
      non_finite += std::isfinite(rows[t][e]) ? 0 : 1;
    }
  }
  ASSERT_TRUE(reference::route(r.forward()).ok());
  for (int64_t i = 0; i < 21; ++i) EXPECT_EQ(r.ids[i], expected[i / 3][i % 3]) << "slot " << i;
  EXPECT_EQ(r.counters[1], non_finite);  // a11: the user can learn of it
}

TEST(ReferenceRouteEdges, F1_NanScoresWithSelectionBiasStillGiveDistinctIds) {
  for (const RouterOptions& options : all_router_options()) {
    Routing r(2, 5, 4);
    r.options = options;
    for (int64_t e = 0; e < 5; ++e) {
      r.logits.set(e, kNan);
      r.logits.set(5 + e, e == 2 ? kInf : -kInf);
    }
    r.selection_bias = Array(DType::kF32, {5}).fill(1.0);
    ASSERT_TRUE(reference::route(r.forward()).ok());
    for (int64_t t = 0; t < 2; ++t) {
      const std::vector<double> row = row_of(r.ids, t);
      const std::set<double> ids(row.begin(), row.end());
      EXPECT_EQ(ids.size(), 4u);
      EXPECT_GE(*ids.begin(), 0);
      EXPECT_LT(*ids.rbegin(), 5);
    }
  }
}

TEST(ReferenceRouteEdges, F3_LogitsThatDifferOnlyInFp32) {
  Routing r(1, 3, 1);
  r.logits.set(0, 1.0);
  r.logits.set(1, 1.0 + 0x1p-20);  // equal in bfloat16
  r.logits.set(2, 0.0);
  ASSERT_TRUE(reference::route(r.forward()).ok());
  EXPECT_EQ(r.ids[0], 1);
}

TEST(ReferenceRouteEdges, LogitsWhoseScoresSaturateKeepTheirOrder) {
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid,
                                  RouterScore::kSqrtSoftplus, RouterScore::kIdentity}) {
    Routing r(1, 4, 3);
    r.options.score = score;
    const float logits[] = {-200, 60, 90, -190};  // float32 scores are 0 or 1
    for (int64_t e = 0; e < 4; ++e) r.logits.set(e, logits[e]);
    ASSERT_TRUE(reference::route(r.forward()).ok());
    EXPECT_EQ(to_ints(r.ids), (std::vector<int32_t>{2, 1, 3}));
  }
}

TEST(ReferenceRouteEdges, F6_SelectionBiasChangesIdsNotWeights) {
  for (RouterOptions options : all_router_options()) {
    options.renormalize = false;
    Rng rng(3);
    Routing r(4, 6, 2);
    r.options = options;
    r.randomize(rng);
    r.selection_bias = Array(DType::kF32, {6}).fill(0.0);
    r.selection_bias.set(1, 10);
    r.selection_bias.set(4, 20);
    ASSERT_TRUE(reference::route(r.forward()).ok());
    for (int64_t t = 0; t < 4; ++t) {
      EXPECT_EQ(r.ids[t * 2], 4);
      EXPECT_EQ(r.ids[t * 2 + 1], 1);
      const Naive naive = naive_router(options, row_of(r.logits, t), {4, 1});
      for (int64_t k = 0; k < 2; ++k) {
        EXPECT_NEAR(r.weights[t * 2 + k], naive.weights[k], 0x1p-23 * std::abs(naive.weights[k]));
      }
    }
  }
}

TEST(ReferenceRouteEdges, F8_BothOrdersAgreeAfterRenormalisation) {
  Rng rng(5);
  Routing before(6, 8, 3), after(6, 8, 3);
  before.randomize(rng);
  after.logits = before.logits;
  after.options.score_before_topk = false;
  ASSERT_TRUE(reference::route(before.forward()).ok());
  ASSERT_TRUE(reference::route(after.forward()).ok());
  EXPECT_TRUE(before.ids.same_bits(after.ids));
  EXPECT_TRUE(close(before.weights, after.weights, rounded_to(DType::kF32)));
  before.options.renormalize = after.options.renormalize = false;
  ASSERT_TRUE(reference::route(before.forward()).ok());
  ASSERT_TRUE(reference::route(after.forward()).ok());
  EXPECT_LT(before.weights[0], after.weights[0]);
}

TEST(ReferenceRouteEdges, H1_PaddingChangesNothingEvenIfItIsNan) {
  Rng rng(6);
  Routing plain(5, 7, 2), padded(20, 7, 2);
  plain.randomize(rng);
  padded.randomize(rng);
  padded.mask = Array(DType::kU8, {20}).fill(0);
  for (int64_t t = 0; t < 20; ++t) {
    for (int64_t e = 0; e < 7; ++e) {
      padded.logits.set(t * 7 + e, t % 4 == 2 ? plain.logits[t / 4 * 7 + e] : kNan);
    }
    if (t % 4 == 2) padded.mask.set(t, 1);
  }
  padded.d_prob_sum = plain.d_prob_sum;
  padded.d_sums = plain.d_sums;
  for (int64_t s = 0; s < 10; ++s)
    padded.d_weights.set((s / 2 * 4 + 2) * 2 + s % 2, plain.d_weights[s]);
  for (Routing* r : {&plain, &padded}) {
    ASSERT_TRUE(reference::route(r->forward()).ok());
    ASSERT_TRUE(reference::route_backward(r->backward()).ok());
  }
  EXPECT_TRUE(plain.prob_sum.same_bits(padded.prob_sum));
  EXPECT_TRUE(plain.sums.same_bits(padded.sums));
  EXPECT_TRUE(plain.counters.same_bits(padded.counters));
  EXPECT_TRUE(plain.plan.counts.same_bits(padded.plan.counts));
  for (int64_t t = 0; t < 20; ++t) {
    for (int64_t e = 0; e < 7; ++e) {
      EXPECT_EQ(padded.d_logits[t * 7 + e], t % 4 == 2 ? plain.d_logits[t / 4 * 7 + e] : 0.0);
    }
  }
}

TEST(ReferenceRouteEdges, MinusInfinityForbidsAnExpertWithFiniteGradients) {
  Rng rng(9);
  for (const RouterOptions& options : all_router_options()) {
    Routing r(3, 5, 2);
    r.options = options;
    r.randomize(rng);
    for (int64_t t = 0; t < 3; ++t) r.logits.set(t * 5 + t, -kInf);
    ASSERT_TRUE(reference::route(r.forward()).ok());
    ASSERT_TRUE(reference::route_backward(r.backward()).ok());
    EXPECT_TRUE(all_finite(r.weights));
    EXPECT_TRUE(all_finite(r.prob_sum));
    EXPECT_TRUE(all_finite(r.sums));
    EXPECT_TRUE(all_finite(r.d_logits));
    for (int64_t t = 0; t < 3; ++t) EXPECT_EQ(r.d_logits[t * 5 + t], 0);
  }
}

// Far below zero sigmoids are exponentials, and their ratios those of a softmax; they underflow in
// float32 below -103.
TEST(ReferenceRouteEdges, SigmoidsThatUnderflowHaveTheStatisticsOfASoftmax) {
  for (const float largest : {-104.0f, -600.0f}) {
    Rng rng(11);
    Routing sigmoid(1, 5, 2), softmax(1, 5, 2);
    const float below_largest[] = {1.25f, 0, 0.5f, 7, 3};
    for (int64_t e = 0; e < 5; ++e) sigmoid.logits.set(e, largest - below_largest[e]);
    sigmoid.d_weights.fill(0);
    sigmoid.d_prob_sum.fill_normal(rng);
    sigmoid.d_sums.fill_normal(rng);
    sigmoid.d_sums.set(0, 0);  // the gradient of the z-loss would hide the others
    softmax.logits = sigmoid.logits;
    softmax.d_weights = sigmoid.d_weights;
    softmax.d_prob_sum = sigmoid.d_prob_sum;
    softmax.d_sums = sigmoid.d_sums;
    sigmoid.options.score = RouterScore::kSigmoid;
    for (Routing* r : {&sigmoid, &softmax}) {
      ASSERT_TRUE(reference::route(r->forward()).ok());
      ASSERT_TRUE(reference::route_backward(r->backward()).ok());
    }
    EXPECT_TRUE(close(sigmoid.prob_sum, softmax.prob_sum, rounded_to(DType::kF32)));
    EXPECT_TRUE(close(sigmoid.sums, softmax.sums, rounded_to(DType::kF32)));
    EXPECT_TRUE(close(sigmoid.d_logits, softmax.d_logits, rounded_to(DType::kF32)));
    EXPECT_GT(std::abs(softmax.d_logits[1]), 0.01);
  }
}

TEST(ReferenceRouteEdges, F9_AnyNumberOfExpertsAndChoices) {
  Rng rng(10);
  for (const int64_t num_experts : {1, 2, 3, 7, 60, 257, 1000}) {
    for (const int64_t per_token : {int64_t{1}, int64_t{3}, int64_t{12}, num_experts}) {
      if (per_token > num_experts) continue;
      Routing r(2, num_experts, per_token);
      r.randomize(rng);
      ASSERT_TRUE(reference::route(r.forward()).ok());
      for (int64_t t = 0; t < 2; ++t) {
        const std::vector<int> expected = naive_top_k(row_of(r.logits, t), per_token);
        for (int64_t k = 0; k < per_token; ++k) EXPECT_EQ(r.ids[t * per_token + k], expected[k]);
      }
    }
  }
}

TEST(ReferenceRouteEdges, NoTokens) {
  Routing r(0, 3, 2);
  ASSERT_TRUE(reference::route(r.forward()).ok());
  ASSERT_TRUE(reference::route_backward(r.backward()).ok());
  EXPECT_TRUE(rows_are_zero(r.prob_sum, 0, 3));
  EXPECT_TRUE(rows_are_zero(r.sums, 0, 2));
  EXPECT_TRUE(rows_are_zero(r.counters, 0, 2));
  EXPECT_TRUE(rows_are_zero(r.plan.counts, 0, 3));
  EXPECT_TRUE(rows_are_zero(r.plan.offsets, 0, 4));
}

}  // namespace
}  // namespace dropless
