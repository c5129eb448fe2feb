// Operands of grouped_wgrad for groups of rows, shared by the backends' tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "dropless/grouped_gemm.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/groups.h"

namespace dropless::testing {

struct WgradCase {
  DType dtype = DType::kF32;
  DType result = DType::kF32;
  Gather gather = Gather::kNone;
  int64_t planes = 1;
  bool fp8 = false;
  bool accumulate = false;
};

struct Wgrad {
  static constexpr int64_t kPerToken = 3;
  WgradCase c;
  RoutedRows routing;
  Array x, dy, old[2];

  Wgrad(const Groups& groups, int64_t kc, int64_t n, WgradCase which, Rng& rng)
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

inline int32_t longest_group(const Groups& groups) {
  int32_t longest = 0;
  for (const int32_t size : groups.sizes) longest = std::max(longest, size);
  return longest;
}

// Compares dw [E, Kc, N] expert by expert: a short one's small gradients must not hide behind a
// long one's.
inline void expect_experts_close(const Array& got, const Array& expected, Bound bound,
                                 const std::string& name) {
  const int64_t kc = got.dim(1), n = got.dim(2);
  for (int64_t e = 0; e < got.dim(0); ++e) {
    Array mine(DType::kF32, {kc, n}), theirs(DType::kF32, {kc, n});
    for (int64_t i = 0; i < kc * n; ++i) {
      mine.set(i, got[e * kc * n + i]);
      theirs.set(i, expected[e * kc * n + i]);
    }
    EXPECT_TRUE(close(mine, theirs, bound)) << name << " expert " << e;
  }
}

}  // namespace dropless::testing
