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
  return all;
}

}  // namespace dropless::testing
