#include <gtest/gtest.h>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/cpu_kernels.h"
#include "tests/cpp/support/grouped_products.h"

namespace dropless::testing {
namespace {

void expect_equal_to_reference(const Wgrad& wgrad, const Groups& groups, Executor& pool) {
  expect_wgrad(wgrad, groups, OnCpu{serial_executor()}, OnCpu{pool});
}

class CpuGroupedWgrad : public CpuKernelTest {};

TEST_P(CpuGroupedWgrad, D1_B1_AdversarialGroupsWithAndWithoutGather) {
  Rng rng(1);
  int which = 0;
  for (const Groups& groups : adversarial_groups()) {
    for (const Gather gather : {Gather::kNone, Gather::kLhs, Gather::kRhs}) {
      WgradCase c;
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
      WgradCase c;
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
    WgradCase c;
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
    WgradCase c;
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
    WgradCase c;
    c.fp8 = fp8;
    c.dtype = DType::kBF16;
    expect_equal_to_reference(Wgrad(groups, 18, 33, c, rng), groups, pool());
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuGroupedWgrad, ::testing::ValuesIn(available_kernel_names()),
                         kernel_of);

}  // namespace
}  // namespace dropless::testing
