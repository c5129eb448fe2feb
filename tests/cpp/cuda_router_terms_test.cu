// Terms of float32 numbers on the GPU, and the routing operations that read and write them.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>

#include "dropless/router_terms.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/routing.h"
#include "tests/cpp/support/routing_cases.h"

namespace dropless::testing {
namespace {

struct Terms {
  Array terms, pairs;

  Terms(int64_t rows, int64_t columns)
      : terms(DType::kBF16, {rows, kTerms, columns}),
        pairs(DType::kBF16, {rows, kTermPairs, columns}) {}
};

class CudaRouterTerms : public GpuTest<> {};

TEST_F(CudaRouterTerms, HaveTheReferencesBits) {
  Rng rng(51);
  for (const auto& [rows, columns] : {std::array<int64_t, 2>{37, 21}, {1, 1}, {513, 128}, {0, 5}}) {
    Array a(DType::kF32, {rows, columns});
    a.fill_normal(rng);
    if (rows > 1) a.set(1, 1e-20), a.set(2, std::numeric_limits<double>::infinity());
    for (const ProductSide side : {ProductSide::kLeft, ProductSide::kRight}) {
      for (const bool with_pairs : {true, false}) {
        const Terms expected(rows, columns), got(rows, columns);
        RouterTermsArgs args = {a, side, expected.terms, expected.pairs};
        if (!with_pairs) args.pairs = {};
        EXPECT_OK(reference::router_terms(args));
        Device device;
        args.a = device.put(a), args.terms = device.put(got.terms);
        if (with_pairs) args.pairs = device.put(got.pairs);
        EXPECT_OK(cuda::router_terms(args, {}, device.stream()));
        device.finish();
        EXPECT_TRUE(got.terms.same_bits(expected.terms));
        EXPECT_TRUE(got.pairs.same_bits(expected.pairs));
      }
    }
  }
}

// One to thirty-two experts a lane, and what is no multiple of a warp.
constexpr int64_t kExperts[] = {5, 64, 130, 1024};

TEST_F(CudaRouterTerms, RouteAddsThemUp) {
  Rng rng(52);
  for (const int64_t experts : kExperts) {
    for (const bool biased : {false, true}) {
      SCOPED_TRACE(std::to_string(experts) + (biased ? " biased" : ""));
      Routing r(197, experts, 3);
      Array terms(DType::kF32, {197, kTerms, experts}), bias(DType::kF32, {experts});
      terms.fill_normal(rng), bias.fill_normal(rng);
      r.add_mask();
      const auto of_terms = [&](const Routing& routing, const Array& summed) {
        RouteOfTermsArgs args = {terms, {}, summed, routing.forward()};
        args.route.logits = summed;
        if (biased) args.logit_bias = bias;
        return args;
      };
      const Routing expected = r, got = r;
      const Array summed(DType::kF32, {197, experts}), want(DType::kF32, {197, experts});
      EXPECT_OK(reference::route_of_terms(of_terms(expected, want)));
      Device device;
      RouteOfTermsArgs args = of_terms(got, summed);
      RouteArgs& route = args.route;
      args.logits = device.put(args.logits), route.logits = args.logits;
      for (ConstTensor* t : {&args.terms, &args.logit_bias, &route.mask}) *t = device.put(*t);
      for (Tensor* t :
           {&route.ids, &route.weights, &route.prob_sum, &route.sums, &route.counters}) {
        *t = device.put(*t);
      }
      route.plan = device.put(route.plan);
      const Tensor workspace = device.workspace(cuda::route_workspace_bytes(route));
      EXPECT_OK(cuda::route_of_terms(args, workspace, device.stream()));
      device.finish();
      EXPECT_TRUE(got.ids.same_bits(expected.ids));
      EXPECT_TRUE(got.plan.same_bits(expected.plan));
      EXPECT_TRUE(got.counters.same_bits(expected.counters));
      EXPECT_TRUE(close(got.weights, expected.weights, router_bound(experts)));
      EXPECT_TRUE(close(got.prob_sum, expected.prob_sum, router_bound(experts + 197)));
      EXPECT_TRUE(close(got.sums, expected.sums, router_bound(experts + 197)));
      EXPECT_TRUE(summed.same_bits(want));
    }
  }
}

TEST_F(CudaRouterTerms, RouteBackwardWritesThem) {
  Rng rng(53);
  for (const int64_t experts : kExperts) {
    for (const bool statistics : {true, false}) {
      SCOPED_TRACE(experts);
      Routing r(197, experts, 3);
      r.randomize(rng);
      r.add_mask();
      ASSERT_TRUE(reference::route(r.forward()).ok());
      Routing zeros = r;
      if (!statistics) zeros.d_prob_sum.fill(0), zeros.d_sums.fill(0);
      const Terms terms(197, experts), alone(197, experts), want(197, experts);
      const auto run = [&](const Routing& routing, bool zeros_left_out, bool f32, const Terms* to) {
        Device device;
        RouteBackwardToTermsArgs args = {routing.backward(), {}, {}};
        RouteBackwardArgs& back = args.route;
        if (zeros_left_out) back.d_prob_sum = back.d_sums = {};
        if (!f32) back.d_logits = {};
        for (ConstTensor* t :
             {&back.logits, &back.ids, &back.d_weights, &back.d_prob_sum, &back.d_sums}) {
          *t = device.put(*t);
        }
        back.d_logits = device.put(back.d_logits);
        if (to == nullptr) {
          EXPECT_OK(cuda::route_backward(back, {}, device.stream()));
        } else {
          args.d_terms = device.put(to->terms), args.d_pairs = device.put(to->pairs);
          EXPECT_OK(cuda::route_backward_to_terms(args, {}, device.stream()));
        }
        device.finish();
      };
      const Routing both = r;
      run(zeros, false, true, nullptr);
      run(both, !statistics, true, &terms);
      run(both, !statistics, false, &alone);
      EXPECT_TRUE(both.d_logits.same_bits(zeros.d_logits));
      EXPECT_OK(
          reference::router_terms({zeros.d_logits, ProductSide::kLeft, want.terms, want.pairs}));
      for (const Terms* got : {&terms, &alone}) {
        EXPECT_TRUE(got->terms.same_bits(want.terms));
        EXPECT_TRUE(got->pairs.same_bits(want.pairs));
      }
    }
  }
}

}  // namespace
}  // namespace dropless::testing
