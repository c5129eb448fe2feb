#include "dropless/route.h"

#include <limits>
#include <string>

#include "core/checker.h"

namespace dropless {
namespace {

// Row numbers are int32 everywhere.
void check_row_count(Checker& c) {
  const int64_t tokens = c.value("T");
  const int64_t per_token = c.value("K");
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  c.that(per_token == 0 || tokens <= kMaxRows / per_token,
         "T*K must be below 2^31, since rows are numbered in int32; got T=" +
             std::to_string(tokens) + ", K=" + std::to_string(per_token));
  if (c.ok()) c.let("M", tokens * per_token);
}

void check_plan(Checker& c, const PlanOutputs& plan, int64_t capacity) {
  check_row_count(c);
  c.require("counts", plan.counts, {DType::kI32}, {"E"});
  c.let("E+1", c.value("E") + 1);
  c.require("offsets", plan.offsets, {DType::kI32}, {"E+1"});
  c.require("slot_of_row", plan.slot_of_row, {DType::kI32}, {"M"});
  c.require("row_of_slot", plan.row_of_slot, {DType::kI32}, {"T", "K"});
  c.that(capacity >= 0,
         "'capacity' must be 0 (no limit) or positive, got " + std::to_string(capacity));
}

void check_options(Checker& c, const RouterOptions& options) {
  const int score = static_cast<int>(options.score);
  c.that(score >= 0 && score <= 3,
         "'score' must be 0 (softmax), 1 (sigmoid), 2 (sqrt-softplus) or 3 (identity), got " +
             std::to_string(score));
  c.that(options.renormalize_eps >= 0.0f,
         "'renormalize_eps' must be at least 0, got " + std::to_string(options.renormalize_eps));
}

void check_experts_per_token(Checker& c) {
  c.that(c.value("K") <= c.value("E"),
         "experts per token (K) must be at most the number of experts (E), got K=" +
             std::to_string(c.value("K")) + ", E=" + std::to_string(c.value("E")));
}

void check_groups(Checker& c, const RouterOptions& o) {
  const int64_t num_experts = c.value("E");
  c.that(o.num_groups >= 1 && num_experts % o.num_groups == 0,
         "'num_groups' must be positive and divide the number of experts (E), got num_groups=" +
             std::to_string(o.num_groups) + ", E=" + std::to_string(num_experts));
  if (!c.ok()) return;
  const int64_t group = num_experts / o.num_groups;
  c.that(o.groups_kept >= 1 && o.groups_kept <= o.num_groups,
         "'groups_kept' must be from 1 to num_groups=" + std::to_string(o.num_groups) + ", got " +
             std::to_string(o.groups_kept));
  c.that(o.groups_kept * group >= c.value("K"),
         "the kept groups must hold K experts, got groups_kept=" + std::to_string(o.groups_kept) +
             " groups of " + std::to_string(group) + ", K=" + std::to_string(c.value("K")));
  c.that(o.num_groups == 1 || (o.group_score_experts >= 1 && o.group_score_experts <= group),
         "'group_score_experts' must be from 1 to the " + std::to_string(group) +
             " experts of a group, got " + std::to_string(o.group_score_experts));
}

}  // namespace

Status check(const PlanArgs& args) {
  Checker c("plan");
  c.require("ids", args.ids, {DType::kI32}, {"T", "K"});
  check_plan(c, args.plan, args.capacity);
  return c.status();
}

Status check(const RouteArgs& args) {
  Checker c("route");
  check_options(c, args.options);
  c.require("logits", args.logits, {DType::kF32, DType::kBF16}, {"T", "E"});
  c.optional("selection_bias", args.selection_bias, {DType::kF32}, {"E"});
  c.optional("mask", args.mask, {DType::kU8}, {"T"});
  c.require("ids", args.ids, {DType::kI32}, {"T", "K"});
  if (c.ok()) check_experts_per_token(c);
  if (c.ok()) check_groups(c, args.options);
  c.optional("forced_ids", args.forced_ids, {DType::kI32}, {"T", "K"});
  c.require("weights", args.weights, {DType::kF32}, {"T", "K"});
  c.require("prob_sum", args.prob_sum, {DType::kF32}, {"E"});
  c.require("sums", args.sums, {DType::kF32}, {"2"});
  c.require("counters", args.counters, {DType::kI32}, {"2"});
  check_plan(c, args.plan, args.capacity);
  return c.status();
}

Status check(const RouteBackwardArgs& args) {
  Checker c("route_backward");
  check_options(c, args.options);
  c.require("logits", args.logits, {DType::kF32, DType::kBF16}, {"T", "E"});
  c.require("ids", args.ids, {DType::kI32}, {"T", "K"});
  if (c.ok()) check_experts_per_token(c);
  c.require("d_weights", args.d_weights, {DType::kF32}, {"T", "K"});
  c.require("d_prob_sum", args.d_prob_sum, {DType::kF32}, {"E"});
  c.require("d_sums", args.d_sums, {DType::kF32}, {"2"});
  c.require("d_logits", args.d_logits, {DType::kF32}, {"T", "E"});
  return c.status();
}

}  // namespace dropless
