// Products that the GEMM driver cuts: groups of several ranges of rows, contractions of several
// blocks, FP8 operands of several waves. Smaller problems run in one piece.
#include <gtest/gtest.h>

#include <functional>

#include "cpu/gemm_kernel.h"
#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/cpu_kernels.h"
#include "tests/cpp/support/executors.h"
#include "tests/cpp/support/groups.h"

namespace dropless::testing {
namespace {

// Runs `body(executor)` with every kernel of this machine, on one thread and on others.
template <class Body>
void for_each_kernel_and_executor(const Body& body) {
  for (const std::string& kernel : available_kernel_names()) {
    SCOPED_TRACE(kernel);
    ASSERT_TRUE(cpu::force_kernels(kernel.c_str()));
    Array first;
    for_each_executor([&](Executor& executor) {
      const Array got = body(executor);
      if (first.dims().empty()) first = got;
      EXPECT_TRUE(got.same_bits(first)) << "results depend on the executor";
    });
  }
  cpu::force_kernels(nullptr);
}

// Counts what the driver hands out when there are many threads.
class CountingExecutor final : public Executor {
 public:
  int64_t calls = 0, items = 0;
  int concurrency() const override { return 13; }
  void parallel_for(int64_t count, const std::function<void(int64_t)>& item) override {
    ++calls;
    items += count;
    for (int64_t i = 0; i < count; ++i) item(i);
  }
};

// Returns how the fastest kernel's work was cut.
CountingExecutor expect_gemm(const Groups& groups, int64_t depth, int64_t n, DType dtype) {
  Rng rng(7);
  const int64_t e = groups.num_experts();
  Array lhs(dtype, {groups.rows(), depth}), lhs_scale, rhs_scale;
  fill_rows(lhs, rng, used_rows(groups));
  const Array rhs = normal(rng, dtype, {e, n, depth});
  if (dtype == DType::kF8E4M3) {
    const int64_t blocks = ceil_div(depth, kScaleBlock);
    lhs_scale = scales(rng, {groups.rows(), blocks}, used_rows(groups));
    rhs_scale = scales(rng, {e, ceil_div(n, kScaleBlock), blocks});
  }
  const Array offsets = ints(groups.offsets());
  const auto args = [&](const Array& out) {
    return GroupedGemmArgs{lhs, lhs_scale, rhs, rhs_scale, {}, offsets, true, out};
  };
  const Array expected(DType::kF32, {groups.rows(), n});
  EXPECT_OK(reference::grouped_gemm(args(expected)));
  for_each_kernel_and_executor([&](Executor& executor) {
    const Array got(DType::kF32, expected.dims());
    EXPECT_OK(cpu::grouped_gemm(args(got), executor));
    EXPECT_TRUE(close(got, expected, rounded_to(DType::kF32) + fp32_sum(depth), groups.offsets()));
    return got;
  });
  CountingExecutor counting;
  EXPECT_OK(cpu::grouped_gemm(args(Array(DType::kF32, expected.dims())), counting));
  return counting;
}

TEST(CpuProductsSplit, RowsOfOneGroup) {
  // With many threads an item has 256 rows, of which the last range is not a multiple of a tile.
  const Groups groups{"rows", {1301, 0, 3, 701}, 1, 2};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    // Its columns are one panel: what is handed out beyond three items are ranges of rows.
    EXPECT_GT(expect_gemm(groups, 40, 300, dtype).items, 3) << name_of(dtype);
  }
}

TEST(CpuProductsSplit, RowsWhoseSumsWaitBetweenBlocks) {
  // 2200 is deeper than any kernel's block, and 1100 rows are several items of 512.
  const Groups groups{"rows_and_blocks", {1100, 33}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    EXPECT_GT(expect_gemm(groups, 2200, 20, dtype).items, 2) << name_of(dtype);
  }
}

TEST(CpuProductsSplit, WavesOfPackedRows) {
  // 8500 rows of 2176 decoded codes are 37 MB where kernels multiply bfloat16 and 74 MB where they
  // multiply float32. A wave has 32 MiB, so groups are cut by its end.
  const int64_t bytes = int64_t{8500} * 2176 * cpu::kernels().bf16->element_bytes;
  const int64_t waves = ceil_div(bytes, int64_t{32} << 20);
  const int64_t calls = expect_gemm({"waves", {5000, 0, 3500}}, 2176, 3, DType::kF8E4M3).calls;
  EXPECT_EQ(calls, 2 * waves) << "packing and multiplying, in every wave";
}

TEST(CpuProductsSplit, ColumnsOfAWeightGradient) {
  // 700 rows of dw[e] for each of two planes, and more columns than one panel.
  Rng rng(8);
  const Groups groups{"wgrad", {33, 0, 20}};
  for (const bool fp8 : {false, true}) {
    const Array x = normal(rng, DType::kBF16, {groups.rows(), 700});
    const Array dy = normal(rng, DType::kBF16, {groups.rows(), 2, 530});
    const Array offsets = ints(groups.offsets());
    const auto args = [&](const Array& first, const Array& second) {
      GroupedWgradArgs a;
      a.x = x, a.dy = dy, a.offsets = offsets, a.fp8 = fp8;
      a.dw[0] = first, a.dw[1] = second;
      return a;
    };
    const Array expected[] = {Array(DType::kF32, {3, 700, 530}), Array(DType::kF32, {3, 700, 530})};
    ASSERT_TRUE(reference::grouped_wgrad(args(expected[0], expected[1])).ok());
    for_each_kernel_and_executor([&](Executor& executor) {
      const Array first(DType::kF32, {3, 700, 530}), second = first;
      EXPECT_OK(cpu::grouped_wgrad(args(first, second), executor));
      const Bound bound = rounded_to(DType::kF32) + fp32_sum(33);
      EXPECT_TRUE(close(first, expected[0], bound));
      EXPECT_TRUE(close(second, expected[1], bound));
      return second;
    });
  }
}

}  // namespace
}  // namespace dropless::testing
