// Owned operands of the grouped products, and their comparison with the reference, on whatever runs
// them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/groups.h"
#include "tests/cpp/support/wgrad.h"

namespace dropless::testing {

// The operands of one product, with every row outside the groups left as NaN.
struct Gemm {
  Array lhs, lhs_scale, rhs, rhs_scale, bias, offsets, out;
  bool transposed;

  Gemm(const Groups& groups, int64_t depth, int64_t n, DType dtype, DType out_dtype,
       bool rhs_transposed, bool with_bias, Rng& rng)
      : lhs(dtype, {groups.rows(), depth}),
        offsets(ints(groups.offsets())),
        out(out_dtype, {groups.rows(), n}),
        transposed(rhs_transposed) {
    const int64_t e = groups.num_experts();
    fill_rows(lhs, rng, used_rows(groups));
    rhs = rhs_transposed ? normal(rng, dtype, {e, n, depth}) : normal(rng, dtype, {e, depth, n});
    if (dtype == DType::kF8E4M3) {
      const int64_t kb = ceil_div(depth, kScaleBlock), nb = ceil_div(n, kScaleBlock);
      lhs_scale = scales(rng, {groups.rows(), kb}, used_rows(groups));
      rhs_scale = scales(rng, {e, rhs_transposed ? nb : kb, rhs_transposed ? kb : nb});
    }
    if (with_bias) bias = normal(rng, DType::kF32, {e, n});
  }

  GroupedGemmArgs args(const Array& result) const {
    return {lhs, lhs_scale, rhs, rhs_scale, bias, offsets, transposed, result};
  }
  Array poisoned() const { return Array(out.dtype(), out.dims()); }
};

// Runs the product twice, by `run` and by `again`, which must give the same bits, and compares it
// with the reference.
template <class Run, class Again>
void expect_product(const Gemm& gemm, const Groups& groups, const Run& run, const Again& again_by) {
  const Array got = gemm.poisoned(), again = gemm.poisoned(), expected = gemm.poisoned();
  EXPECT_OK(run(gemm.args(got)));
  EXPECT_OK(again_by(gemm.args(again)));
  EXPECT_OK(reference::grouped_gemm(gemm.args(expected)));
  const std::vector<int32_t> offsets = groups.offsets();
  EXPECT_TRUE(close(got, expected, rounded_to(got.dtype()) + fp32_sum(gemm.lhs.dim(1)), offsets))
      << groups.name << " depth " << gemm.lhs.dim(1) << " n " << got.dim(1) << " "
      << name_of(gemm.lhs.dtype()) << (gemm.transposed ? " transposed" : "");
  EXPECT_TRUE(rows_are_zero(got, 0, offsets.front()));
  EXPECT_TRUE(rows_are_zero(got, offsets.back(), groups.rows()));
  EXPECT_TRUE(got.same_bits(again)) << "two runs differ";
}

template <class Run, class Again>
void expect_wgrad(const Wgrad& wgrad, const Groups& groups, const Run& run, const Again& again_by) {
  Array got[2] = {wgrad.old[0], wgrad.old[1]};
  Array again[2] = {wgrad.old[0], wgrad.old[1]};
  Array expected[2] = {wgrad.old[0], wgrad.old[1]};
  EXPECT_OK(run(wgrad.args(got)));
  EXPECT_OK(again_by(wgrad.args(again)));
  EXPECT_OK(reference::grouped_wgrad(wgrad.args(expected)));
  for (int64_t p = 0; p < wgrad.c.planes; ++p) {
    EXPECT_TRUE(got[p].same_bits(again[p])) << "two runs differ";
    expect_experts_close(
        got[p], expected[p], rounded_to(wgrad.c.result) + fp32_sum(longest_group(groups)),
        groups.name + " plane " + std::to_string(p) + " " + name_of(wgrad.c.dtype));
  }
}

}  // namespace dropless::testing
