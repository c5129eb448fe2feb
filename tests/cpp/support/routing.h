// Owned arguments of the routing operations.
#pragma once

#include <cmath>
#include <vector>

#include "dropless/route.h"
#include "tests/cpp/support/array.h"

namespace dropless::testing {

struct PlanArrays {
  Array counts;       // [E]
  Array offsets;      // [E+1]
  Array slot_of_row;  // [M]
  Array row_of_slot;  // [T, K]

  PlanArrays() = default;
  PlanArrays(int64_t tokens, int64_t per_token, int64_t num_experts)
      : counts(DType::kI32, {num_experts}),
        offsets(DType::kI32, {num_experts + 1}),
        slot_of_row(DType::kI32, {tokens * per_token}),
        row_of_slot(DType::kI32, {tokens, per_token}) {}

  PlanOutputs args() const { return {counts, offsets, slot_of_row, row_of_slot}; }
  bool same_bits(const PlanArrays& other) const {
    return counts.same_bits(other.counts) && offsets.same_bits(other.offsets) &&
           slot_of_row.same_bits(other.slot_of_row) && row_of_slot.same_bits(other.row_of_slot);
  }
};

// Inputs and poisoned outputs of route and route_backward; arrays without a shape are "not given".
struct Routing {
  RouterOptions options;
  Array logits, selection_bias, mask, forced_ids;
  int64_t capacity = 0;
  Array ids, weights, prob_sum, sums, counters;
  PlanArrays plan;
  Array d_weights, d_prob_sum, d_sums, d_logits;

  Routing(int64_t tokens, int64_t num_experts, int64_t per_token, DType dtype = DType::kF32)
      : logits(dtype, {tokens, num_experts}),
        ids(DType::kI32, {tokens, per_token}),
        weights(DType::kF32, {tokens, per_token}),
        prob_sum(DType::kF32, {num_experts}),
        sums(DType::kF32, {2}),
        counters(DType::kI32, {2}),
        plan(tokens, per_token, num_experts),
        d_weights(DType::kF32, {tokens, per_token}),
        d_prob_sum(DType::kF32, {num_experts}),
        d_sums(DType::kF32, {2}),
        d_logits(DType::kF32, {tokens, num_experts}) {}

  int64_t tokens() const { return logits.dim(0); }
  int64_t num_experts() const { return logits.dim(1); }
  int64_t per_token() const { return ids.dim(1); }

  // Marks every third token as padding.
  void add_mask() {
    mask = Array(DType::kU8, {tokens()});
    for (int64_t t = 0; t < tokens(); ++t) mask.set(t, t % 3 == 1 ? 0 : 1);
  }
  bool is_real(int64_t t) const { return !mask.view().given() || mask[t] != 0; }

  void randomize(Rng& rng) {
    logits.fill_normal(rng, 1.5);
    if (options.score == RouterScore::kIdentity && options.renormalize) {
      // Sums of logits of either sign may cancel, and their quotients then have few digits.
      for (int64_t i = 0; i < logits.size(); ++i) logits.set(i, 0.125 + std::abs(logits[i]));
    }
    d_weights.fill_normal(rng);
    d_prob_sum.fill_normal(rng);
    d_sums.fill_normal(rng);
  }

  RouteArgs forward() const {
    RouteArgs a;
    a.options = options;
    a.logits = logits;
    a.selection_bias = selection_bias;
    a.mask = mask;
    a.forced_ids = forced_ids;
    a.capacity = capacity;
    a.ids = ids;
    a.weights = weights;
    a.prob_sum = prob_sum;
    a.sums = sums;
    a.counters = counters;
    a.plan = plan.args();
    return a;
  }
  RouteBackwardArgs backward() const {
    return {options, logits, ids, d_weights, d_prob_sum, d_sums, d_logits};
  }
};

// Every combination of score, order and renormalisation: none, plain, with an epsilon that is
// added, and with one that some sums reach and others do not. Scales alternate.
inline std::vector<RouterOptions> all_router_options() {
  std::vector<RouterOptions> all;
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid,
                                  RouterScore::kSqrtSoftplus, RouterScore::kIdentity}) {
    for (const bool before : {true, false}) {
      const float scale = before ? 2.5f : 1.0f;
      all.push_back({score, before, false, 0.0f, scale});
      all.push_back({score, before, true, 0.0f, 3.5f - scale});
      all.push_back({score, before, true, 0.125f, scale});
      all.push_back({score, before, true, score == RouterScore::kSoftmax ? 0.6f : 3.0f, scale,
                     /*renormalize_clamp=*/true});
    }
  }
  return all;
}

}  // namespace dropless::testing
