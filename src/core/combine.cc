#include "dropless/combine.h"

#include <string>

#include "core/checker.h"

namespace dropless {
namespace {

void check_experts_per_token(Checker& c, int64_t experts_per_token) {
  c.that(experts_per_token >= 1,
         "'experts_per_token' must be at least 1, got " + std::to_string(experts_per_token));
}

}  // namespace

Status check(const PermuteArgs& args) {
  Checker c("permute");
  check_experts_per_token(c, args.experts_per_token);
  c.require("x", args.x, {DType::kF32, DType::kBF16}, {"T", "H"});
  c.require("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  c.require("rows", args.rows, {args.x.dtype}, {"M", "H"});
  c.let("K", args.experts_per_token);
  c.optional("row_of_slot", args.row_of_slot, {DType::kI32}, {"T", "K"});
  return c.status();
}

Status check(const CombineArgs& args) {
  Checker c("combine");
  c.require("rows", args.rows, {DType::kF32, DType::kBF16}, {"M", "H"});
  c.require("row_of_slot", args.row_of_slot, {DType::kI32}, {"T", "K"});
  c.optional("weights", args.weights, {DType::kF32}, {"T", "K"});
  c.require("out", args.out, {DType::kF32, DType::kBF16}, {"T", "H"});
  return c.status();
}

Status check(const CombineBackwardArgs& args) {
  Checker c("combine_backward");
  c.require("dy", args.dy, {DType::kF32, DType::kBF16}, {"T", "H"});
  c.require("rows", args.rows, {DType::kF32, DType::kBF16}, {"M", "H"});
  c.require("row_of_slot", args.row_of_slot, {DType::kI32}, {"T", "K"});
  c.require("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  c.require("weights", args.weights, {DType::kF32}, {"T", "K"});
  c.require("d_rows", args.d_rows, {args.rows.dtype}, {"M", "H"});
  c.require("d_weights", args.d_weights, {DType::kF32}, {"T", "K"});
  return c.status();
}

Status check(const GroupSumArgs& args) {
  Checker c("group_sum");
  check_experts_per_token(c, args.experts_per_token);
  c.require("x", args.x, {DType::kF32, DType::kBF16}, {args.gather ? "T" : "M", "P", "N"});
  if (args.gather || args.weights.given()) {
    c.require("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  } else {
    c.optional("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  }
  if (args.weights.given()) {
    c.let("K", args.experts_per_token);
    c.require("weights", args.weights, {DType::kF32}, {"T", "K"});
  }
  c.require("out", args.out, {DType::kF32}, {"E", "P", "N"});
  c.let("E+1", c.value("E") + 1);
  c.require("offsets", args.offsets, {DType::kI32}, {"E+1"});
  return c.status();
}

}  // namespace dropless
