// Memory that is not there is a Status, whichever thread asked for it; nothing is thrown.
#include <gtest/gtest.h>

#include <new>

#include "dropless/combine.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"
#include "tests/cpp/support/routing.h"

namespace dropless::testing {
namespace {

constexpr int64_t T = 6, K = 2, E = 3, M = T * K, H = 5, I = 4;

// Every item finds no memory.
class NoMemory final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(int64_t count, const std::function<void(int64_t)>&) override {
    if (count > 0) throw std::bad_alloc();
  }
};

class CpuOutOfMemory : public ::testing::Test {
 protected:
  static Array zeros(DType dtype, std::vector<int64_t> dims) {
    return Array(dtype, std::move(dims)).fill(0);
  }
  void expect_exhausted(const Status& status, const char* op) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << op;
    EXPECT_EQ(status.message(), std::string(op) + ": out of memory");
  }

  NoMemory executor;
  Rng rng{2};
  Routing routing = Routing(T, E, K);
  Array x = normal(rng, DType::kF32, {T, H}), rows = normal(rng, DType::kF32, {M, H});
  Array weights = normal(rng, DType::kF32, {T, K}), h = normal(rng, DType::kF32, {M, 2, I});
  Array a = normal(rng, DType::kF32, {M, I});
  Array gate = normal(rng, DType::kF32, {E, H, I}), down = normal(rng, DType::kF32, {E, I, H});

  void SetUp() override {
    routing.randomize(rng);
    EXPECT_OK(reference::route(routing.forward()));
  }
};

TEST_F(CpuOutOfMemory, Routing) {
  expect_exhausted(cpu::route(routing.forward(), executor), "route");
  expect_exhausted(cpu::route_backward(routing.backward(), executor), "route_backward");
  expect_exhausted(cpu::plan({routing.ids, 0, routing.plan.args()}, executor), "plan");
}

TEST_F(CpuOutOfMemory, RowMovesAndQuantiser) {
  const Array& map = routing.plan.slot_of_row;
  const Array& inverse = routing.plan.row_of_slot;
  expect_exhausted(cpu::permute({x, map, K, rows, {}}, executor), "permute");
  expect_exhausted(cpu::combine({rows, inverse, weights, x}, executor), "combine");
  expect_exhausted(cpu::combine_backward({x, rows, inverse, map, weights, rows, weights}, executor),
                   "combine_backward");
  const Array sums = zeros(DType::kF32, {E, 2, I});
  expect_exhausted(cpu::group_sum({h, {}, {}, routing.plan.offsets, false, 1, sums}, executor),
                   "group_sum");
  const Array q = zeros(DType::kF8E4M3, {T, H}), scale = zeros(DType::kF32, {T, 1});
  expect_exhausted(cpu::quantize_rows({x, ScaleRounding::kFp32, q, scale}, executor),
                   "quantize_rows");
  const Array w = zeros(DType::kF8E4M3, {E, H, I}), w_t = zeros(DType::kF8E4M3, {E, I, H});
  const Array block = zeros(DType::kF32, {E, 1, 1});
  expect_exhausted(
      cpu::quantize_weight({gate, ScaleRounding::kFp32, w, w_t, block, block}, executor),
      "quantize_weight");
}

TEST_F(CpuOutOfMemory, Products) {
  const Array& offsets = routing.plan.offsets;
  expect_exhausted(cpu::grouped_gemm({rows, {}, gate, {}, {}, offsets, false, a}, executor),
                   "grouped_gemm");
  GroupedWgradArgs wgrad;
  wgrad.x = rows, wgrad.dy = h, wgrad.offsets = offsets, wgrad.dw[0] = wgrad.dw[1] = gate;
  expect_exhausted(cpu::grouped_wgrad(wgrad, executor), "grouped_wgrad");

  ExpertUpArgs up;
  up.x = x, up.gate = up.up = gate, up.offsets = offsets, up.a = a, up.experts_per_token = K;
  up.slot_of_row = routing.plan.slot_of_row;
  expect_exhausted(cpu::expert_up(up, executor), "expert_up");
  ExpertDownBackwardArgs back;
  back.dy = x, back.down = down, back.h = h, back.weights = weights, back.offsets = offsets;
  back.slot_of_row = routing.plan.slot_of_row, back.dh = h, back.pa = a, back.d_weights = weights;
  expect_exhausted(cpu::expert_down_backward(back, executor), "expert_down_backward");
  ExpertUpBackwardArgs dx;
  dx.dh = h, dx.gate = dx.up = gate, dx.offsets = offsets, dx.dx_rows = rows;
  expect_exhausted(cpu::expert_up_backward(dx, executor), "expert_up_backward");
}

}  // namespace
}  // namespace dropless::testing
