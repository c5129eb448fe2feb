// The reference router against a naive computation and finite differences, both in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Naive {
  std::vector<double> weights;  // [K]
  std::vector<double> prob;     // [E]
  double lse_square = 0, entropy = 0;
};

double naive_score(RouterScore score, double z) {
  if (score == RouterScore::kSigmoid) return 1 / (1 + std::exp(-z));
  return score == RouterScore::kSqrtSoftplus ? std::sqrt(std::log(1 + std::exp(z))) : z;
}

// One token, by the definitions; `ids` are the chosen experts.
Naive naive_router(const RouterOptions& o, const std::vector<double>& z,
                   const std::vector<int>& ids) {
  const bool shares = o.score == RouterScore::kSigmoid || o.score == RouterScore::kSqrtSoftplus;
  Naive r;
  double exp_all = 0, exp_chosen = 0, score_all = 0;
  for (const double v : z) exp_all += std::exp(v), score_all += naive_score(o.score, v);
  for (const int id : ids) exp_chosen += std::exp(z[id]);
  for (const int id : ids) {
    double w = naive_score(o.score, z[id]);
    if (o.score == RouterScore::kSoftmax) {
      w = std::exp(z[id]) / (o.score_before_topk ? exp_all : exp_chosen);
    }
    r.weights.push_back(w);
  }
  if (o.renormalize) {
    double sum = 0;
    for (const double w : r.weights) sum += w;
    const double eps = o.renormalize_eps;
    for (double& w : r.weights) w /= o.renormalize_clamp ? std::max(sum, eps) : sum + eps;
  }
  for (double& w : r.weights) w *= o.scale;
  for (const double v : z) {
    const double q = shares ? naive_score(o.score, v) / score_all : std::exp(v) / exp_all;
    r.prob.push_back(q);
    r.entropy -= q * std::log(q);
  }
  r.lse_square = std::log(exp_all) * std::log(exp_all);
  return r;
}

std::vector<double> row_of(const Array& a, int64_t t) {
  const int64_t width = a.dim(1);
  std::vector<double> row;
  for (int64_t i = 0; i < width; ++i) row.push_back(a[t * width + i]);
  return row;
}

// K largest of `keys`, by repeated search.
std::vector<int> naive_top_k(std::vector<double> keys, int64_t k) {
  std::vector<int> ids;
  for (int64_t i = 0; i < k; ++i) {
    int best = 0;
    for (size_t e = 1; e < keys.size(); ++e) {
      if (keys[e] > keys[best]) best = static_cast<int>(e);
    }
    ids.push_back(best);
    keys[best] = -kInf;
  }
  return ids;
}

// The K experts of a token by the rules of RouterOptions, in double: no two values are equal.
std::vector<int> naive_selection(const RouterOptions& o, const std::vector<double>& z,
                                 const Array& bias, int64_t k) {
  double exp_all = 0;
  for (const double v : z) exp_all += std::exp(v);
  std::vector<double> ranked;
  for (size_t e = 0; e < z.size(); ++e) {
    double value = z[e];
    if (o.score_before_topk) {
      value =
          o.score == RouterScore::kSoftmax ? std::exp(z[e]) / exp_all : naive_score(o.score, z[e]);
    }
    ranked.push_back(value + (bias.view().given() ? bias[static_cast<int64_t>(e)] : 0.0));
  }
  const size_t size = z.size() / static_cast<size_t>(o.num_groups);
  std::vector<double> scores;
  for (size_t g = 0; g < static_cast<size_t>(o.num_groups); ++g) {
    std::vector<double> group(ranked.begin() + g * size, ranked.begin() + (g + 1) * size);
    std::sort(group.rbegin(), group.rend());
    scores.push_back(std::accumulate(group.begin(), group.begin() + o.group_score_experts, 0.0));
  }
  const std::vector<int> kept = naive_top_k(scores, o.groups_kept);
  for (size_t e = 0; e < ranked.size(); ++e) {
    const bool is_kept =
        std::find(kept.begin(), kept.end(), static_cast<int>(e / size)) != kept.end();
    if (!is_kept) ranked[e] = o.group_mask_zero ? 0.0 : -kInf;
  }
  return naive_top_k(ranked, k);
}

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

TEST(ReferenceRoute, F1_TopKIsValidForAnyLogits) {
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

TEST(ReferenceRoute, F1_NanScoresWithSelectionBiasStillGiveDistinctIds) {
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

TEST(ReferenceRoute, F3_LogitsThatDifferOnlyInFp32) {
  Routing r(1, 3, 1);
  r.logits.set(0, 1.0);
  r.logits.set(1, 1.0 + 0x1p-20);  // equal in bfloat16
  r.logits.set(2, 0.0);
  ASSERT_TRUE(reference::route(r.forward()).ok());
  EXPECT_EQ(r.ids[0], 1);
}

TEST(ReferenceRoute, LogitsWhoseScoresSaturateKeepTheirOrder) {
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

TEST(ReferenceRoute, F6_SelectionBiasChangesIdsNotWeights) {
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

TEST(ReferenceRoute, F8_BothOrdersAgreeAfterRenormalisation) {
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

TEST(ReferenceRoute, H1_PaddingChangesNothingEvenIfItIsNan) {
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

TEST(ReferenceRoute, MinusInfinityForbidsAnExpertWithFiniteGradients) {
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
TEST(ReferenceRoute, SigmoidsThatUnderflowHaveTheStatisticsOfASoftmax) {
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

TEST(ReferenceRoute, F9_AnyNumberOfExpertsAndChoices) {
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

TEST(ReferenceRoute, NoTokens) {
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
