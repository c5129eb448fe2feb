// The router and the dispatch plan on the GPU against the reference: every setting, every plan.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dropless/route.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/route_on_device.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class CudaRoute : public GpuTest<::testing::TestWithParam<RouterOptions>> {
 protected:
  static std::vector<Routing> cases() { return routing_cases(GetParam()); }
};

TEST_P(CudaRoute, ForwardHasTheReferencesIdsAndPlan) {
  for (Routing& expected : cases()) {
    SCOPED_TRACE(expected.logits.shape());
    const Routing poisoned = expected;
    ASSERT_TRUE(reference::route(expected.forward()).ok());
    Routing first = poisoned;
    gpu_route(first);
    expect_same_routing(first, expected);
    Routing again = poisoned;
    gpu_route(again);
    expect_same_bits(again, first);
  }
}

TEST_P(CudaRoute, BackwardMatchesReference) {
  for (Routing& r : cases()) {
    if (r.options.num_groups > 1) continue;  // groups change the ids alone
    SCOPED_TRACE(r.logits.shape());
    ASSERT_TRUE(reference::route(r.forward()).ok());
    Routing expected = r, got = r;
    ASSERT_TRUE(reference::route_backward(expected.backward()).ok());
    gpu_route_backward(got);
    // The gradient of a softmax is a difference of sums over E terms.
    const Bound bound = router_bound(4 * r.num_experts()) + Bound{0, 32 * 0x1p-24};
    // With one expert every softmax is 1 and its gradient 0 but for rounding.
    if (r.num_experts() > 1) {
      EXPECT_TRUE(close(got.d_logits, expected.d_logits, bound));
    }
    EXPECT_TRUE(all_finite(got.d_logits));
  }
}

TEST_P(CudaRoute, F1_SameIdsAsReferenceForLogitsThatAreNotFinite) {
  Rng rng(32);
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
    gpu_route(got);
    EXPECT_TRUE(got.ids.same_bits(expected.ids));
    EXPECT_TRUE(got.plan.same_bits(expected.plan));
    EXPECT_TRUE(got.counters.same_bits(expected.counters));
    for (int64_t i = 0; i < got.weights.size(); ++i) {
      EXPECT_EQ(std::isnan(got.weights[i]), std::isnan(expected.weights[i])) << "slot " << i;
    }
    gpu_route_backward(got);
  }
}

TEST_P(CudaRoute, F1_TiesTakeTheLowestIndex) {
  Rng rng(33);
  Routing expected(300, 133, 9, DType::kBF16);
  expected.options = GetParam();
  for (int64_t i = 0; i < expected.logits.size(); ++i) {
    expected.logits.set(i, static_cast<double>(rng() % 4));
  }
  for (const bool biased : {false, true}) {
    if (biased) {
      expected.selection_bias = Array(DType::kF32, {133});
      for (int64_t e = 0; e < 133; ++e) expected.selection_bias.set(e, static_cast<double>(e % 3));
    }
    Routing got = expected;
    ASSERT_TRUE(reference::route(expected.forward()).ok());
    gpu_route(got);
    EXPECT_TRUE(got.ids.same_bits(expected.ids));
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaRoute, ::testing::ValuesIn(all_router_options()));

class CudaPlan : public GpuTest<> {
 protected:
  static void expect_reference(const Array& ids, int64_t num_experts, int64_t capacity) {
    SCOPED_TRACE(ids.shape() + ", E " + std::to_string(num_experts) + ", capacity " +
                 std::to_string(capacity));
    const PlanArrays expected(ids.dim(0), ids.dim(1), num_experts);
    ASSERT_TRUE(reference::plan({ids, capacity, expected.args()}).ok());
    const PlanArrays got(ids.dim(0), ids.dim(1), num_experts);
    Device device;
    const PlanArgs args = {device.put(ids), capacity, device.put(got.args())};
    const Tensor workspace = device.workspace(cuda::plan_workspace_bytes(args));
    EXPECT_OK(cuda::plan(args, workspace, device.stream()));
    device.finish();
    EXPECT_TRUE(got.same_bits(expected));
  }
};

TEST_F(CudaPlan, B9_AdversarialRoutings) {
  Rng rng(39);
  for (const auto& [tokens, per_token, num_experts] : {std::array<int64_t, 3>{0, 3, 5},
                                                       {1, 1, 1},
                                                       {1, 5, 1024},
                                                       {257, 2, 3},
                                                       {2048, 4, 17},
                                                       {2049, 1, 1},
                                                       {4097, 16, 128},
                                                       {300, 40, 600},
                                                       {70001, 3, 5}}) {
    Array random(DType::kI32, {tokens, per_token});
    // One in ten ids is out of range, on either side; a token may name an expert twice.
    for (int64_t i = 0; i < random.size(); ++i) {
      const int64_t id = static_cast<int64_t>(rng() % static_cast<uint64_t>(num_experts));
      random.set(i, static_cast<double>(
                        rng() % 10 == 0 ? (rng() % 2 == 0 ? -1 - id : num_experts + id) : id));
    }
    Array last(DType::kI32, {tokens, per_token});
    last.fill(static_cast<double>(num_experts - 1));
    Array none(DType::kI32, {tokens, per_token});
    none.fill(-1);
    for (const Array* ids : {&random, &last, &none}) {
      for (const int64_t capacity : {0, 1, 37}) expect_reference(*ids, num_experts, capacity);
    }
  }
}

}  // namespace
}  // namespace dropless::testing
