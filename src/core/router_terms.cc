#include "dropless/router_terms.h"

#include <string>

#include "core/checker.h"

namespace dropless {

Status check(const RouterTermsArgs& args) {
  Checker c("router_terms");
  const int side = static_cast<int>(args.side);
  c.that(side == 0 || side == 1,
         "'side' must be 0 (left) or 1 (right), got " + std::to_string(side));
  c.require("a", args.a, {DType::kF32}, {"R", "C"});
  c.require("terms", args.terms, {DType::kBF16}, {"R", "3", "C"});
  c.optional("pairs", args.pairs, {DType::kBF16}, {"R", "6", "C"});
  return c.status();
}

Status check(const RouteOfTermsArgs& args) {
  Checker c("route_of_terms");
  c.require("terms", args.terms, {DType::kF32}, {"T", "3", "E"});
  c.optional("logit_bias", args.logit_bias, {DType::kF32}, {"E"});
  c.require("logits", args.logits, {DType::kF32}, {"T", "E"});
  c.that(args.route.logits.data == args.logits.data,
         "the logits of 'route' must be the result 'logits', but are another array");
  return c.ok() ? check(args.route) : c.status();
}

Status check(const RouteBackwardToTermsArgs& args) {
  Checker c("route_backward_to_terms");
  c.require("logits", args.route.logits, {DType::kF32, DType::kBF16}, {"T", "E"});
  c.require("d_terms", args.d_terms, {DType::kBF16}, {"T", "3", "E"});
  c.require("d_pairs", args.d_pairs, {DType::kBF16}, {"T", "6", "E"});
  if (!c.ok()) return c.status();
  // What may be left out stands in with the right shape and an address that nobody reads.
  RouteBackwardArgs whole = args.route;
  float somewhere = 0;
  const int64_t tokens = whole.logits.dims[0], num_experts = whole.logits.dims[1];
  if (!whole.d_prob_sum.given()) whole.d_prob_sum = {&somewhere, DType::kF32, 1, {num_experts}};
  if (!whole.d_sums.given()) whole.d_sums = {&somewhere, DType::kF32, 1, {2}};
  if (!whole.d_logits.given()) {
    whole.d_logits = {&somewhere, DType::kF32, 2, {tokens, num_experts}};
  }
  return check(whole);
}

}  // namespace dropless
