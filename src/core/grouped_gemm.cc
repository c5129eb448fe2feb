#include "dropless/grouped_gemm.h"

#include <string>

#include "core/checker.h"
#include "core/token_blocks.h"

namespace dropless {

Status check(const GroupedGemmArgs& args) {
  Checker c("grouped_gemm");
  c.require("lhs", args.lhs, {DType::kF32, DType::kBF16, DType::kF8E4M3}, {"M", "Kc"});
  if (args.rhs_transposed) {
    c.require("rhs", args.rhs, {args.lhs.dtype}, {"E", "N", "Kc"});
  } else {
    c.require("rhs", args.rhs, {args.lhs.dtype}, {"E", "Kc", "N"});
  }
  if (args.lhs.dtype == DType::kF8E4M3) {
    c.let("ceil(Kc/128)", ceil_div(c.value("Kc"), kScaleBlock));
    c.let("ceil(N/128)", ceil_div(c.value("N"), kScaleBlock));
    c.require("lhs_scale", args.lhs_scale, {DType::kF32}, {"M", "ceil(Kc/128)"});
    if (args.rhs_transposed) {
      c.require("rhs_scale", args.rhs_scale, {DType::kF32}, {"E", "ceil(N/128)", "ceil(Kc/128)"});
    } else {
      c.require("rhs_scale", args.rhs_scale, {DType::kF32}, {"E", "ceil(Kc/128)", "ceil(N/128)"});
    }
  } else {
    c.absent("lhs_scale", args.lhs_scale, "used only when lhs is float8_e4m3fn");
    c.absent("rhs_scale", args.rhs_scale, "used only when rhs is float8_e4m3fn");
  }
  c.optional("bias", args.bias, {DType::kF32}, {"E", "N"});
  c.let("E+1", c.value("E") + 1);
  c.require("offsets", args.offsets, {DType::kI32}, {"E+1"});
  c.require("out", args.out, {DType::kF32, DType::kBF16}, {"M", "N"});
  return c.status();
}

Status check(const GroupedWgradArgs& args) {
  Checker c("grouped_wgrad");
  check_scale_rounding(c, args.scale_rounding);
  const int gather = static_cast<int>(args.gather);
  c.that(gather >= 0 && gather <= 2,
         "'gather' must be 0 (none), 1 (x) or 2 (dy), got " + std::to_string(gather));
  c.that(args.experts_per_token >= 1,
         "'experts_per_token' must be at least 1, got " + std::to_string(args.experts_per_token));
  const bool x_blocked = args.x.dtype == DType::kF8E4M3, dy_blocked = args.dy_scale.given();
  if (x_blocked) {
    c.require("x", args.x, {DType::kF8E4M3}, {"B", "1", "C", "128"});
    c.require("x_scale", args.x_scale, {DType::kF32}, {"B", "1", "C"});
    c.that(args.fp8 && args.gather == Gather::kRhs, "float8 'x' needs fp8 = 1 and gather = 2 (dy)");
  } else {
    c.require("x", args.x, {DType::kF32, DType::kBF16},
              {args.gather == Gather::kLhs ? "T" : "M", "Kc"});
    c.absent("x_scale", args.x_scale, "used only when x is float8_e4m3fn");
  }
  if (dy_blocked) {
    c.require("dy", args.dy, {DType::kF8E4M3}, {"B", "P", "C", "128"});
    c.require("dy_scale", args.dy_scale, {DType::kF32}, {"B", "P", "C"});
    c.that(args.fp8 && args.gather == Gather::kLhs, "float8 'dy' needs fp8 = 1 and gather = 1 (x)");
  } else if (x_blocked) {
    c.require("dy", args.dy, {DType::kF32, DType::kBF16}, {"T", "P", "N"});
  } else {
    c.require("dy", args.dy, {args.x.dtype}, {args.gather == Gather::kRhs ? "T" : "M", "P", "N"});
  }
  c.that(c.value("P") == 1 || c.value("P") == 2,
         "argument 'dy' must have P = 1 or 2 in its shape [M, P, N], got " + describe(args.dy));
  if (args.gather != Gather::kNone) {
    c.require("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  }
  c.require("dw[0]", args.dw[0], {DType::kF32, DType::kBF16}, {"E", "Kc", "N"});
  if (c.value("P") == 2) {
    c.require("dw[1]", args.dw[1], {args.dw[0].dtype}, {"E", "Kc", "N"});
  } else {
    c.absent("dw[1]", args.dw[1], "used only when dy has P = 2");
  }
  if (x_blocked || dy_blocked) {
    const int64_t width = c.value(x_blocked ? "Kc" : "N");
    const BlockedOperand expected(c.value("M"), c.value("E"), 1, width);
    c.that(c.value("B") == expected.blocks && c.value("C") == expected.columns,
           "a float8 operand must have " + std::to_string(expected.blocks) + " blocks of " +
               std::to_string(expected.columns) + " columns, got " +
               describe(x_blocked ? args.x : args.dy));
  }
  c.let("E+1", c.value("E") + 1);
  c.require("offsets", args.offsets, {DType::kI32}, {"E+1"});
  return c.status();
}

}  // namespace dropless
