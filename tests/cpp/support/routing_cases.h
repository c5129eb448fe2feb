// What the router's backends are compared on, and how.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/routing.h"

namespace dropless::testing {

// exp, log and the division that normalises cost a few units in the last place each; a weight is a
// quotient of up to E such terms.
inline Bound router_bound(int64_t terms) { return Bound{16 * 0x1p-24, 0} + fp32_sum(terms); }

// A group-limited selection.
struct GroupLimit {
  int64_t num_experts, per_token;
  int32_t num_groups, groups_kept, score_experts;
  bool mask_zero;

  void set(RouterOptions& options) const {
    options.num_groups = num_groups;
    options.groups_kept = groups_kept;
    options.group_score_experts = score_experts;
    options.group_mask_zero = mask_zero;
  }
};

// DeepSeek-V3's and DeepSeek-V2's, groups of one, and groups that end inside a warp's row of 32.
inline std::vector<GroupLimit> group_limits() {
  return {
      {256, 8, 8, 4, 2, true}, {160, 6, 8, 3, 1, true}, {60, 4, 6, 2, 3, false},
      {24, 5, 24, 9, 1, true}, {64, 6, 2, 1, 2, false}, {320, 12, 20, 7, 5, false},
      {15, 3, 3, 1, 5, true},
  };
}

// Sizes on both sides of every switch: experts a lane of a GPU's warp (32, 64, 128, 256, 512),
// tokens a chunk (16) and chunks (128); padding, a capacity and a selection bias.
inline std::vector<Routing> routing_cases(const RouterOptions& options) {
  Rng rng(31);
  std::vector<Routing> all;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    all.emplace_back(1, 1, 1, dtype);
    all.emplace_back(0, 5, 2, dtype);
    all.emplace_back(67, 6, 2, dtype);
    all.emplace_back(131, 60, 4, dtype);
    all.emplace_back(33, 257, 8, dtype);
    all.emplace_back(5, 17, 17, dtype);
    all.emplace_back(2049, 33, 7, dtype);
  }
  for (Routing& r : all) {
    r.options = options;
    r.randomize(rng);
  }
  all.push_back(all[2]);
  all.back().add_mask();
  all.push_back(all[3]);
  all.back().add_mask();
  all.back().capacity = 5;
  all.back().selection_bias = normal(rng, DType::kF32, {60});
  for (const GroupLimit& limit : group_limits()) {
    for (const bool biased : {false, true}) {
      Routing r(37, limit.num_experts, limit.per_token);
      r.options = options;
      limit.set(r.options);
      r.randomize(rng);
      // Negative for most: a mask of 0 then lets masked experts win.
      if (biased) r.selection_bias = normal(rng, DType::kF32, {limit.num_experts}, 2.0);
      all.push_back(r);
    }
  }
  return all;
}

// Every combination of the options with groups, selection bias and the logits' dtype, at one small
// size, with a mask and some forced ids.
inline std::vector<Routing> every_combination() {
  const std::vector<GroupLimit> limits = {{12, 3, 1, 1, 1, false},
                                          {12, 3, 4, 2, 1, false},
                                          {12, 3, 4, 2, 2, true},
                                          {12, 3, 3, 1, 3, true}};
  Rng rng(41);
  std::vector<Routing> all;
  for (const RouterOptions& options : all_router_options()) {
    for (const float scale : {1.0f, 2.5f}) {
      for (const GroupLimit& limit : limits) {
        for (const bool biased : {false, true}) {
          for (const DType dtype : {DType::kF32, DType::kBF16}) {
            Routing r(8, limit.num_experts, limit.per_token, dtype);
            r.options = options;
            r.options.scale = scale;
            limit.set(r.options);
            r.randomize(rng);
            r.add_mask();
            if (biased) r.selection_bias = normal(rng, DType::kF32, {limit.num_experts});
            r.forced_ids = Array(DType::kI32, {8, 3}).fill(kRouteFreely);
            // The last two tokens: a slot without an expert, and padding.
            const int forced[] = {11, -1, 0, -1, -1, -1};
            for (int64_t i = 0; i < 6; ++i) r.forced_ids.set(18 + i, forced[i]);
            all.push_back(r);
          }
        }
      }
    }
  }
  return all;
}

// One token whose scores underflow more and more, on both sides of router::kScoreIsExp; also
// with a selection bias, which makes a softmax underflow too: it chooses the smallest scores. The
// reference itself, in double, underflows below -745.
inline std::vector<Routing> underflow_cases(RouterScore score) {
  Rng rng(24);
  std::vector<Routing> all;
  for (const float largest : {-19.0f, -20.0f, -21.0f, -60.0f, -104.0f, -200.0f, -500.0f}) {
    Routing r(1, 6, 2);
    r.options.score = score;
    r.randomize(rng);
    r.d_sums.set(0, 0);  // the gradient of the z-loss would hide the others
    const float below_largest[] = {100, 0.5, 0, 200, 3, 0.25};
    for (int64_t e = 0; e < 6; ++e) r.logits.set(e, largest - below_largest[e]);
    all.push_back(r);
    r.selection_bias = Array(DType::kF32, {6}).fill(0);
    r.selection_bias.set(0, 2);
    r.selection_bias.set(3, 3);
    all.push_back(r);
  }
  return all;
}

}  // namespace dropless::testing
