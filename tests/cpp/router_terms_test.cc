// Terms of float32 numbers, and the routing operations that read and write them.
#include "dropless/router_terms.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/executors.h"
#include "tests/cpp/support/routing.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr std::array<int, kTermPairs> kLeft = {2, 1, 0, 1, 0, 0}, kRight = {0, 1, 2, 0, 1, 0};

struct Terms {
  Array terms, pairs;

  Terms(int64_t rows, int64_t columns)
      : terms(DType::kBF16, {rows, kTerms, columns}),
        pairs(DType::kBF16, {rows, kTermPairs, columns}) {}
};

// That the terms add up to `a` [R, C] exactly, each below half a unit of the one before, and that
// every pair's term is where it belongs.
void expect_terms_of(const Array& a, const Terms& got, const std::array<int, kTermPairs>& order) {
  const int64_t rows = a.dim(0), columns = a.dim(1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      double term[kTerms], sum = 0;
      for (int t = 0; t < kTerms; ++t) {
        term[t] = got.terms[(r * kTerms + t) * columns + c];
        sum += term[t];
      }
      ASSERT_EQ(sum, a[r * columns + c]) << r << " " << c;
      for (int t = 1; t < kTerms; ++t) {
        ASSERT_LE(std::abs(term[t]), 0x1p-8 * std::abs(term[t - 1])) << r << " " << c;
      }
      for (int p = 0; p < kTermPairs; ++p) {
        ASSERT_EQ(got.pairs[(r * kTermPairs + p) * columns + c],
                  term[order[static_cast<size_t>(p)]])
            << r << " " << c << " " << p;
      }
    }
  }
}

TEST(RouterTerms, AddUpAndStandInTheirPlaces) {
  Rng rng(1);
  Array a(DType::kF32, {37, 21});
  a.fill_normal(rng);
  for (int64_t i = 0; i < 5; ++i) a.set(i, std::array{0.0, -1.0, 65504.1, 1.0000001, 1e-20}[i]);
  for (const ProductSide side : {ProductSide::kLeft, ProductSide::kRight}) {
    const auto& order = side == ProductSide::kLeft ? kLeft : kRight;
    const Terms expected(37, 21);
    EXPECT_OK(reference::router_terms({a, side, expected.terms, expected.pairs}));
    expect_terms_of(a, expected, order);
    for_each_executor([&](Executor& executor) {
      const Terms got(37, 21), alone(37, 21);
      EXPECT_OK(cpu::router_terms({a, side, got.terms, got.pairs}, executor));
      EXPECT_TRUE(got.terms.same_bits(expected.terms));
      EXPECT_TRUE(got.pairs.same_bits(expected.pairs));
      EXPECT_OK(cpu::router_terms({a, side, alone.terms, {}}, executor));
      EXPECT_TRUE(alone.terms.same_bits(expected.terms));
    });
  }
}

TEST(RouterTerms, WhatIsNotFiniteStaysInTheFirst) {
  Array a(DType::kF32, {1, 3});
  const float inf = std::numeric_limits<float>::infinity();
  a.set(0, inf), a.set(1, -inf), a.set(2, std::numeric_limits<double>::quiet_NaN());
  const Terms got(1, 3);
  EXPECT_OK(cpu::router_terms({a, ProductSide::kLeft, got.terms, got.pairs}, serial_executor()));
  EXPECT_EQ(got.terms[0], inf);
  EXPECT_EQ(got.terms[1], -inf);
  EXPECT_TRUE(std::isnan(got.terms[2]));
  for (int64_t i = 3; i < 9; ++i) EXPECT_EQ(got.terms[i], 0) << i;
}

TEST(RouterTerms, BadArgumentsAreNamed) {
  const Terms got(4, 5);
  const Array a(DType::kF32, {4, 5}), wide(DType::kF32, {4, 6});
  EXPECT_TRUE(check(RouterTermsArgs{a, ProductSide::kLeft, got.terms, {}}).ok());
  const Status sizes = check(RouterTermsArgs{wide, ProductSide::kLeft, got.terms, {}});
  EXPECT_NE(sizes.message().find("'terms'"), std::string::npos) << sizes.message();
  const Status side = check(RouterTermsArgs{a, static_cast<ProductSide>(2), got.terms, {}});
  EXPECT_NE(side.message().find("'side'"), std::string::npos) << side.message();
}

// Routing of logits whose terms are `terms` [T, 3, E], against that of their sums.
TEST(RouterTerms, RouteAddsThemUp) {
  Rng rng(2);
  for (const bool biased : {false, true}) {
    Routing expected(67, 21, 3);
    Array terms(DType::kF32, {67, kTerms, 21}), bias(DType::kF32, {21});
    terms.fill_normal(rng), bias.fill_normal(rng);
    for (int64_t t = 0; t < 67; ++t) {
      for (int64_t e = 0; e < 21; ++e) {
        const auto term = [&](int i) { return terms.as<float>()[(t * kTerms + i) * 21 + e]; };
        const float sum = (term(2) + term(1)) + term(0);
        expected.logits.as<float>()[t * 21 + e] = biased ? sum + bias.as<float>()[e] : sum;
      }
    }
    expected.add_mask();
    const auto with_terms = [&](const Routing& r, const Array& summed) {
      RouteOfTermsArgs args = {terms, {}, summed, r.forward()};
      args.route.logits = summed;
      if (biased) args.logit_bias = bias;
      return args;
    };
    const auto expect_same = [](const Routing& got, const Routing& want, const Array& summed) {
      EXPECT_TRUE(summed.same_bits(want.logits));
      EXPECT_TRUE(got.ids.same_bits(want.ids));
      EXPECT_TRUE(got.weights.same_bits(want.weights));
      EXPECT_TRUE(got.prob_sum.same_bits(want.prob_sum));
      EXPECT_TRUE(got.plan.same_bits(want.plan));
    };
    const Routing poisoned = expected;
    Routing by_reference = poisoned, by_cpu = poisoned, cpu_expected = poisoned;
    const Array first(DType::kF32, {67, 21}), second(DType::kF32, {67, 21});
    EXPECT_OK(reference::route(expected.forward()));
    EXPECT_OK(reference::route_of_terms(with_terms(by_reference, first)));
    expect_same(by_reference, expected, first);
    EXPECT_OK(cpu::route(cpu_expected.forward(), serial_executor()));
    EXPECT_OK(cpu::route_of_terms(with_terms(by_cpu, second), serial_executor()));
    expect_same(by_cpu, cpu_expected, second);
  }
}

TEST(RouterTerms, RoutesArgumentsAreNamed) {
  const Routing r(7, 5, 2);
  const Array terms(DType::kF32, {7, kTerms, 5}), summed(DType::kF32, {7, 5});
  RouteOfTermsArgs args = {terms, {}, summed, r.forward()};
  EXPECT_NE(check(args).message().find("'logits'"), std::string::npos);
  args.route.logits = summed;
  EXPECT_OK(check(args));
  args.logit_bias = summed;
  EXPECT_NE(check(args).message().find("'logit_bias'"), std::string::npos);
  const Terms to(7, 5);
  RouteBackwardToTermsArgs back = {r.backward(), to.terms, to.pairs};
  back.route.d_logits = {}, back.route.d_sums = back.route.d_prob_sum = {};
  EXPECT_OK(check(back));
  back.route.d_weights = {};
  EXPECT_NE(check(back).message().find("'d_weights'"), std::string::npos);
  back = {r.backward(), to.pairs, to.terms};
  EXPECT_NE(check(back).message().find("'d_terms'"), std::string::npos);
}

// The gradient as terms, with and without float32 beside them, and cotangents that are left out.
TEST(RouterTerms, RouteBackwardWritesThem) {
  Rng rng(3);
  Routing r(67, 21, 3);
  r.randomize(rng);
  r.add_mask();
  ASSERT_TRUE(reference::route(r.forward()).ok());
  for (const bool on_cpu : {false, true}) {
    const auto run = [&](const RouteBackwardArgs& args) {
      return on_cpu ? cpu::route_backward(args, serial_executor())
                    : reference::route_backward(args);
    };
    const auto run_to_terms = [&](const RouteBackwardToTermsArgs& args) {
      return on_cpu ? cpu::route_backward_to_terms(args, serial_executor())
                    : reference::route_backward_to_terms(args);
    };
    for (const bool statistics : {true, false}) {
      Routing whole = r, got = r;
      if (!statistics) whole.d_prob_sum.fill(0), whole.d_sums.fill(0);
      EXPECT_OK(run(whole.backward()));
      const Terms beside(67, 21), alone(67, 21);
      RouteBackwardToTermsArgs args = {got.backward(), beside.terms, beside.pairs};
      if (!statistics) args.route.d_prob_sum = args.route.d_sums = {};
      EXPECT_OK(run_to_terms(args));
      EXPECT_TRUE(got.d_logits.same_bits(whole.d_logits));
      expect_terms_of(got.d_logits, beside, kLeft);
      args.route.d_logits = {}, args.d_terms = alone.terms, args.d_pairs = alone.pairs;
      EXPECT_OK(run_to_terms(args));
      EXPECT_TRUE(alone.terms.same_bits(beside.terms));
      EXPECT_TRUE(alone.pairs.same_bits(beside.pairs));
    }
  }
}

}  // namespace
}  // namespace dropless
