#include <gtest/gtest.h>

#include <cmath>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/cpu_kernels.h"
#include "tests/cpp/support/groups.h"

namespace dropless::testing {
namespace {

struct Case {
  DType dtype = DType::kF32;
  DType result = DType::kF32;
  Gather gather = Gather::kNone;
  int64_t planes = 1;
  bool fp8 = false;
  bool accumulate = false;
};

struct Wgrad {
  static constexpr int64_t kPerToken = 3;
  Case c;
  RoutedRows routing;
  Array x, dy, old[2];

  Wgrad(const Groups& groups, int64_t kc, int64_t n, Case which, Rng& rng)
      : c(which), routing(routed_rows(groups, kPerToken, rng)) {
    const auto operand = [&](bool gathered, std::vector<int64_t> dims) {
      dims[0] = gathered ? routing.tokens : groups.rows();
      Array a(c.dtype, dims);
      fill_rows(a, rng, gathered ? used_tokens(routing) : used_rows(groups));
      return a;
    };
    x = operand(c.gather == Gather::kLhs, {0, kc});
    dy = operand(c.gather == Gather::kRhs, {0, c.planes, n});
    for (int64_t p = 0; p < c.planes; ++p) {
      old[p] = Array(c.result, {groups.num_experts(), kc, n});
      if (c.accumulate) old[p].fill_normal(rng, 10.0);
    }
  }

  GroupedWgradArgs args(const Array* dw) const {
    GroupedWgradArgs a;
    a.x = x;
    a.dy = dy;
    if (c.gather != Gather::kNone) a.slot_of_row = routing.slot_of_row;
    a.offsets = routing.offsets;
    a.gather = c.gather;
    a.experts_per_token = kPerToken;
    a.fp8 = c.fp8;
    a.accumulate = c.accumulate;
    for (int64_t p = 0; p < c.planes; ++p) a.dw[p] = dw[p];
    return a;
  }
};

void expect_equal_to_reference(const Wgrad& wgrad, const Groups& groups, Executor& pool) {
  Array got[2] = {wgrad.old[0], wgrad.old[1]};
  Array again[2] = {wgrad.old[0], wgrad.old[1]};
  Array expected[2] = {wgrad.old[0], wgrad.old[1]};
  EXPECT_OK(cpu::grouped_wgrad(wgrad.args(got), serial_executor()));
  EXPECT_OK(cpu::grouped_wgrad(wgrad.args(again), pool));
  EXPECT_OK(reference::grouped_wgrad(wgrad.args(expected)));
  int32_t longest = 0;
  for (const int32_t size : groups.sizes) longest = std::max(longest, size);
  for (int64_t p = 0; p < wgrad.c.planes; ++p) {
    EXPECT_TRUE(got[p].same_bits(again[p])) << "one thread and four differ";
    // Expert by expert: a short one's small gradients must not hide behind a long one's.
    const int64_t kc = got[p].dim(1), n = got[p].dim(2);
    for (int64_t e = 0; e < groups.num_experts(); ++e) {
      Array mine(DType::kF32, {kc, n}), theirs(DType::kF32, {kc, n});
      for (int64_t i = 0; i < kc * n; ++i) {
        mine.set(i, got[p][e * kc * n + i]);
        theirs.set(i, expected[p][e * kc * n + i]);
      }
      EXPECT_TRUE(close(mine, theirs, rounded_to(wgrad.c.result) + fp32_sum(longest)))
          << groups.name << " expert " << e << " plane " << p << " " << name_of(wgrad.c.dtype);
    }
  }
}

class CpuGroupedWgrad : public CpuKernelTest {};

TEST_P(CpuGroupedWgrad, D1_B1_AdversarialGroupsWithAndWithoutGather) {
  Rng rng(1);
  int which = 0;
  for (const Groups& groups : adversarial_groups()) {
    for (const Gather gather : {Gather::kNone, Gather::kLhs, Gather::kRhs}) {
      Case c;
      c.gather = gather;
      c.planes = 1 + which % 2;
      c.dtype = which / 2 % 2 == 0 ? DType::kF32 : DType::kBF16;
      c.result = which % 3 == 0 ? DType::kBF16 : DType::kF32;
      expect_equal_to_reference(Wgrad(groups, 35, 41, c, rng), groups, pool());
      ++which;
    }
  }
}

TEST_P(CpuGroupedWgrad, A7_EverySizeAroundATileEdge) {
  Rng rng(2);
  int which = 0;
  for (const int64_t kc : {1, 2, 15, 17, 31, 33, 64, 129}) {
    for (const int64_t n : {1, 16, 17, 33, 127}) {
      constexpr int32_t kRows[] = {1, 2, 15, 16, 17, 31, 33, 64, 127, 129};
      const Groups groups{"sizes", {kRows[which % 10], 0, kRows[(which + 3) % 10]}, 2, 3};
      Case c;
      c.dtype = which % 2 == 0 ? DType::kBF16 : DType::kF32;
      c.planes = 1 + which / 2 % 2;
      expect_equal_to_reference(Wgrad(groups, kc, n, c, rng), groups, pool());
      ++which;
    }
  }
}

TEST_P(CpuGroupedWgrad, E10_AccumulatesIntoWhatIsThere) {
  Rng rng(3);
  const Groups groups{"accumulate", {9, 0, 70}, 0, 1};
  for (const DType result : {DType::kF32, DType::kBF16}) {
    Case c;
    c.accumulate = true;
    c.planes = 2;
    c.dtype = DType::kBF16;
    c.result = result;
    expect_equal_to_reference(Wgrad(groups, 20, 300, c, rng), groups, pool());
  }
}

TEST_P(CpuGroupedWgrad, D6_Fp8BlocksCountFromEachExpertsFirstRow) {
  Rng rng(4);
  const Groups groups{"fp8", {127, 0, 129, 1, 300}, 3, 2};
  for (const Gather gather : {Gather::kNone, Gather::kLhs, Gather::kRhs}) {
    Case c;
    c.gather = gather;
    c.fp8 = true;
    c.planes = 2;
    c.dtype = gather == Gather::kLhs ? DType::kF32 : DType::kBF16;
    expect_equal_to_reference(Wgrad(groups, 37, 45, c, rng), groups, pool());
  }
}

TEST_P(CpuGroupedWgrad, MoreRowsThanABlock) {
  Rng rng(5);
  const Groups groups{"long", {2500, 5}};
  for (const bool fp8 : {false, true}) {
    Case c;
    c.fp8 = fp8;
    c.dtype = DType::kBF16;
    expect_equal_to_reference(Wgrad(groups, 18, 33, c, rng), groups, pool());
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuGroupedWgrad, ::testing::ValuesIn(available_kernel_names()),
                         kernel_of);

}  // namespace
}  // namespace dropless::testing
