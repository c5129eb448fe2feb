#include <gtest/gtest.h>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/cpu_kernels.h"
#include "tests/cpp/support/grouped_products.h"

namespace dropless::testing {
namespace {

void expect_equal_to_reference(const Gemm& gemm, const Groups& groups, Executor& pool) {
  expect_product(gemm, groups, OnCpu{serial_executor()}, OnCpu{pool});
}

class CpuGroupedGemm : public CpuKernelTest {};

// Sizes around every tile edge: 2 is below, 15..17 and 31..33 around the rows and columns of tiles,
// 127 and 129 around a scale block.
constexpr int64_t kSizes[] = {1, 2, 15, 16, 17, 31, 33, 64, 127, 129};

TEST_P(CpuGroupedGemm, A7_EverySizeAroundATileEdge) {
  Rng rng(1);
  int which = 0;
  for (const int64_t m : kSizes) {
    for (const int64_t n : kSizes) {
      // Each (m, n) meets three depths; over all of them each pair of sizes occurs.
      for (int i = 0; i < 3; ++i, ++which) {
        const int64_t depth = kSizes[(which * 7 + i) % 10];
        const Groups groups{"sizes", {static_cast<int32_t>(m), 3}, 0, 2};
        const DType dtype = which % 2 == 0 ? DType::kF32 : DType::kBF16;
        const Gemm gemm(groups, depth, n, dtype, dtype, which % 3 == 0, which % 5 == 0, rng);
        expect_equal_to_reference(gemm, groups, pool());
      }
    }
  }
}

TEST_P(CpuGroupedGemm, B1_AdversarialGroupsInEveryDtype) {
  Rng rng(2);
  for (const Groups& groups : adversarial_groups()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
      for (const bool transposed : {false, true}) {
        const DType out = dtype == DType::kF32 ? DType::kF32 : DType::kBF16;
        const Gemm gemm(groups, 43, 37, dtype, out, transposed, transposed, rng);
        expect_equal_to_reference(gemm, groups, pool());
      }
    }
  }
}

TEST_P(CpuGroupedGemm, D4_ScaleBlocksOneToFiveAndOddTails) {
  Rng rng(3);
  const Groups groups{"blocks", {17, 0, 2}, 1, 1};
  for (const int64_t depth : {127, 128, 255, 577}) {
    for (const int64_t n : {129, 257}) {
      for (const bool transposed : {false, true}) {
        const Gemm gemm(groups, depth, n, DType::kF8E4M3, DType::kF32, transposed, true, rng);
        expect_equal_to_reference(gemm, groups, pool());
      }
    }
  }
}

// Deeper than any kernel's K block, wider than an item's panel.
TEST_P(CpuGroupedGemm, ContractionLongerThanABlockAndRowsWiderThanAPanel) {
  Rng rng(4);
  const Groups groups{"deep", {33, 2}, 0, 1};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    const Gemm gemm(groups, 2600, 300, dtype, DType::kF32, dtype != DType::kBF16, false, rng);
    expect_equal_to_reference(gemm, groups, pool());
  }
}

TEST_P(CpuGroupedGemm, ZeroSizedDimensions) {
  Rng rng(5);
  const Groups groups{"zero", {3, 4}, 0, 2};
  for (const auto& [depth, n] : {std::pair<int64_t, int64_t>{0, 5}, {7, 0}, {0, 0}}) {
    const Gemm gemm(groups, depth, n, DType::kF32, DType::kF32, false, true, rng);
    expect_equal_to_reference(gemm, groups, pool());
  }
}

// XLA's threads may treat subnormal numbers as zero; an e4m3 weight of 2^-9 with scale 2^-126 is
// one.
TEST_P(CpuGroupedGemm, I2_SubnormalResultsSurvive) {
  const Groups groups{"one", {1}};
  Rng rng(6);
  Gemm gemm(groups, 1, 1, DType::kF8E4M3, DType::kF32, true, false, rng);
  gemm.lhs.set(0, 0x1p-9);
  gemm.rhs.set(0, 1.0);
  gemm.lhs_scale.set(0, 0x1p-126);
  gemm.rhs_scale.set(0, 1.0);
  const Array got = gemm.poisoned();
  EXPECT_OK(cpu::grouped_gemm(gemm.args(got), serial_executor()));
  EXPECT_EQ(got[0], 0x1p-135);
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuGroupedGemm, ::testing::ValuesIn(available_kernel_names()),
                         kernel_of);

TEST(CpuKernels, OneIsChosenAndPortableIsAlwaysThere) {
  const std::vector<std::string> names = available_kernel_names();
  EXPECT_EQ(cpu::kernels().name, names.front());
  EXPECT_EQ(names.back(), "portable");
  EXPECT_FALSE(cpu::force_kernels("no such kernel"));
  EXPECT_EQ(cpu::kernels().name, names.front());
}

}  // namespace
}  // namespace dropless::testing
