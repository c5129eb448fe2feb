// No tokens: arrays of no elements may have no memory, and nothing is read or written through them.
#include <gtest/gtest.h>

#include <algorithm>

#include "dropless/combine.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"
#include "dropless/route.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/compare.h"

namespace dropless::testing {
namespace {

constexpr int64_t E = 3, K = 2, H = 5, I = 4;

// A view without memory, one of whose dimensions is 0.
Tensor nothing(DType dtype, std::initializer_list<int64_t> dims) {
  Tensor t{nullptr, dtype, static_cast<int>(dims.size()), {}};
  std::copy(dims.begin(), dims.end(), t.dims);
  return t;
}

class CpuEmpty : public ::testing::Test {
 protected:
  Rng rng{1};
  Array offsets = ints({0, 0, 0, 0});
  Array gate = normal(rng, DType::kF32, {E, H, I}), up = normal(rng, DType::kF32, {E, H, I});
  Array down = normal(rng, DType::kF32, {E, I, H});
  Tensor x = nothing(DType::kF32, {0, H}), h = nothing(DType::kF32, {0, 2, I});
  Tensor slots = nothing(DType::kF32, {0, K}), map = nothing(DType::kI32, {0});
  Tensor inverse = nothing(DType::kI32, {0, K});
  Executor& executor = serial_executor();
};

TEST_F(CpuEmpty, Experts) {
  ExpertUpArgs forward;
  forward.x = x, forward.gate = gate, forward.up = up, forward.offsets = offsets;
  forward.slot_of_row = map, forward.experts_per_token = K, forward.h = h;
  forward.a = nothing(DType::kF32, {0, I});
  EXPECT_OK(cpu::expert_up(forward, executor));

  ExpertDownBackwardArgs backward;
  backward.dy = x, backward.down = down, backward.h = h, backward.weights = slots;
  backward.offsets = offsets, backward.slot_of_row = map, backward.dh = h;
  backward.pa = nothing(DType::kF32, {0, I}), backward.d_weights = slots;
  EXPECT_OK(cpu::expert_down_backward(backward, executor));

  ExpertUpBackwardArgs rows;
  rows.dh = h, rows.gate = gate, rows.up = up, rows.offsets = offsets, rows.dx_rows = x;
  EXPECT_OK(cpu::expert_up_backward(rows, executor));
}

TEST_F(CpuEmpty, GroupedProducts) {
  EXPECT_OK(cpu::grouped_gemm({x, {}, gate, {}, {}, offsets, false, nothing(DType::kF32, {0, I})},
                              executor));
  const Array dw[] = {Array(DType::kF32, {E, H, I}), Array(DType::kF32, {E, H, I})};
  GroupedWgradArgs wgrad;
  wgrad.x = x, wgrad.dy = h, wgrad.offsets = offsets;
  wgrad.dw[0] = dw[0], wgrad.dw[1] = dw[1];
  EXPECT_OK(cpu::grouped_wgrad(wgrad, executor));
  for (const Array& a : dw) EXPECT_TRUE(rows_are_zero(a, 0, E));
}

TEST_F(CpuEmpty, RowMovesAndQuantiser) {
  PermuteArgs permute;
  permute.x = x, permute.slot_of_row = map, permute.experts_per_token = K, permute.rows = x;
  EXPECT_OK(cpu::permute(permute, executor));
  EXPECT_OK(cpu::combine({x, inverse, slots, x}, executor));
  EXPECT_OK(cpu::combine_backward({x, x, inverse, map, slots, x, slots}, executor));
  const Array sums(DType::kF32, {E, 2, I});
  EXPECT_OK(cpu::group_sum({h, {}, {}, offsets, false, 1, sums}, executor));
  EXPECT_TRUE(rows_are_zero(sums, 0, E));
  QuantizeRowsArgs quantize;
  quantize.x = x, quantize.q = nothing(DType::kF8E4M3, {0, H});
  quantize.scale = nothing(DType::kF32, {0, 1});
  EXPECT_OK(cpu::quantize_rows(quantize, executor));
}

TEST_F(CpuEmpty, Routing) {
  const Array prob_sum(DType::kF32, {E}), sums(DType::kF32, {2});
  const Array counters(DType::kI32, {2}), counts(DType::kI32, {E}), starts(DType::kI32, {E + 1});
  RouteArgs route;
  route.logits = nothing(DType::kF32, {0, E}), route.ids = inverse, route.weights = slots;
  route.prob_sum = prob_sum, route.sums = sums, route.counters = counters;
  route.plan = {counts, starts, map, inverse};
  EXPECT_OK(cpu::route(route, executor));
  for (const Array* a : {&prob_sum, &sums, &counters, &counts, &starts}) {
    EXPECT_TRUE(rows_are_zero(*a, 0, a->dim(0)));
  }
  RouteBackwardArgs backward;
  backward.logits = route.logits, backward.ids = inverse, backward.d_weights = slots;
  backward.d_prob_sum = prob_sum, backward.d_sums = sums;
  backward.d_logits = nothing(DType::kF32, {0, E});
  EXPECT_OK(cpu::route_backward(backward, executor));
}

}  // namespace
}  // namespace dropless::testing
