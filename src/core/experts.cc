#include "dropless/experts.h"

#include <cmath>
#include <string>

#include "core/checker.h"
#include "core/token_blocks.h"

namespace dropless {
namespace {

// Also gives the letter P its value.
void check_activation(Checker& c, const ActivationOptions& activation) {
  const int kind = static_cast<int>(activation.kind);
  c.that(kind >= 0 && kind <= 4,
         "'activation' must be 0 (silu), 1 (gelu), 2 (gelu_tanh), 3 (relu) or 4 (relu_squared), "
         "got " +
             std::to_string(kind));
  const auto number = [](float value) { return std::to_string(value); };
  c.that(activation.slope > 0 && activation.slope < kNoLimit,
         "'activation_slope' must be positive and finite, got " + number(activation.slope));
  c.that(activation.kind == ActivationKind::kSilu || activation.slope == 1.0f,
         "'activation_slope' is of silu only and must be 1 otherwise, got " +
             number(activation.slope));
  c.that(activation.gate_limit > 0,
         "'gate_limit' must be positive, got " + number(activation.gate_limit));
  c.that(activation.up_limit > 0,
         "'up_limit' must be positive, got " + number(activation.up_limit));
  c.that(std::isfinite(activation.up_offset),
         "'up_offset' must be finite, got " + number(activation.up_offset));
  c.that(activation.gated || (activation.up_limit == kNoLimit && activation.up_offset == 0.0f),
         "'up_limit' and 'up_offset' are of gated experts only");
  c.let("P", activation.parts());
}

constexpr const char* kUngated = "used only when gated";

void let_scale_blocks(Checker& c) {
  c.let("ceil(H/128)", ceil_div(c.value("H"), kScaleBlock));
  c.let("ceil(I/128)", ceil_div(c.value("I"), kScaleBlock));
}

// Pre-activations as expert_up stores them for operands of dtype `operands`.
void check_h(Checker& c, DType operands, const ConstTensor& h, const ConstTensor& h_scale) {
  if (operands == DType::kF32) {
    c.require("h", h, {DType::kF32}, {"M", "P", "I"});
  } else {
    c.require("h", h, {DType::kBF16, DType::kF8E4M3}, {"M", "P", "I"});
  }
  if (h.dtype == DType::kF8E4M3) {
    c.require("h_scale", h_scale, {DType::kF32}, {"M", "P", "ceil(I/128)"});
  } else {
    c.absent("h_scale", h_scale, "used only when h is float8_e4m3fn");
  }
}

void check_offsets(Checker& c, const ConstTensor& offsets) {
  c.let("E+1", c.value("E") + 1);
  c.require("offsets", offsets, {DType::kI32}, {"E+1"});
}

}  // namespace

Status check(const ExpertUpArgs& args) {
  Checker c("expert_up");
  check_scale_rounding(c, args.scale_rounding);
  check_activation(c, args.activation);
  c.that(args.experts_per_token >= 1,
         "'experts_per_token' must be at least 1, got " + std::to_string(args.experts_per_token));
  const DType operands = args.x.dtype;
  c.require("x", args.x, {DType::kF32, DType::kBF16, DType::kF8E4M3}, {"T", "H"});
  const bool t = args.weights_transposed;
  const auto weight = [&](const char* name, const ConstTensor& w) {
    t ? c.require(name, w, {operands}, {"E", "I", "H"})
      : c.require(name, w, {operands}, {"E", "H", "I"});
  };
  weight("gate", args.gate);
  if (args.activation.gated) {
    weight("up", args.up);
  } else {
    c.absent("up", args.up, kUngated);
    c.absent("up_scale", args.up_scale, kUngated);
    c.absent("up_bias", args.up_bias, kUngated);
  }
  let_scale_blocks(c);
  if (operands == DType::kF8E4M3) {
    c.require("x_scale", args.x_scale, {DType::kF32}, {"T", "ceil(H/128)"});
    const auto scale = [&](const char* name, const ConstTensor& s) {
      t ? c.require(name, s, {DType::kF32}, {"E", "ceil(I/128)", "ceil(H/128)"})
        : c.require(name, s, {DType::kF32}, {"E", "ceil(H/128)", "ceil(I/128)"});
    };
    scale("gate_scale", args.gate_scale);
    if (args.activation.gated) scale("up_scale", args.up_scale);
  } else {
    c.absent("x_scale", args.x_scale, "used only when x is float8_e4m3fn");
    c.absent("gate_scale", args.gate_scale, "used only when gate is float8_e4m3fn");
    c.absent("up_scale", args.up_scale, "used only when up is float8_e4m3fn");
  }
  c.optional("gate_bias", args.gate_bias, {DType::kF32}, {"E", "I"});
  c.optional("up_bias", args.up_bias, {DType::kF32}, {"E", "I"});
  check_offsets(c, args.offsets);
  c.require("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  if (args.h.given()) {
    check_h(c, operands, args.h, args.h_scale);
  } else {
    c.absent("h_scale", args.h_scale, "used only when h is given");
  }
  c.require("a", args.a, {operands}, {"M", "I"});
  if (operands == DType::kF8E4M3) {
    c.require("a_scale", args.a_scale, {DType::kF32}, {"M", "ceil(I/128)"});
  } else {
    c.absent("a_scale", args.a_scale, "used only when a is float8_e4m3fn");
  }
  return c.status();
}

Status check(const ExpertDownBackwardArgs& args) {
  Checker c("expert_down_backward");
  check_scale_rounding(c, args.scale_rounding);
  check_activation(c, args.activation);
  const DType operands = args.dy.dtype;
  const DType result = operands == DType::kF32 ? DType::kF32 : DType::kBF16;
  c.require("dy", args.dy, {DType::kF32, DType::kBF16, DType::kF8E4M3}, {"T", "H"});
  c.require("down", args.down, {operands}, {"E", "I", "H"});
  let_scale_blocks(c);
  if (operands == DType::kF8E4M3) {
    c.require("dy_scale", args.dy_scale, {DType::kF32}, {"T", "ceil(H/128)"});
    c.require("down_scale", args.down_scale, {DType::kF32}, {"E", "ceil(I/128)", "ceil(H/128)"});
  } else {
    c.absent("dy_scale", args.dy_scale, "used only when dy is float8_e4m3fn");
    c.absent("down_scale", args.down_scale, "used only when down is float8_e4m3fn");
  }
  c.optional("down_bias", args.down_bias, {DType::kF32}, {"E", "H"});
  check_h(c, operands, args.h, args.h_scale);
  c.require("weights", args.weights, {DType::kF32}, {"T", "K"});
  check_offsets(c, args.offsets);
  c.require("slot_of_row", args.slot_of_row, {DType::kI32}, {"M"});
  if (args.dh_columns.given()) {
    c.that(operands == DType::kF8E4M3 && args.activation.gated && args.dh_q.given(),
           "'dh_columns' needs float8_e4m3fn operands, gated experts and dh_q");
    const BlockedOperand blocked(c.value("M"), c.value("E"), 1, c.value("I"));
    c.let("M/128+E", blocked.blocks);
    c.let("ceil(I/128)*128", blocked.columns);
    const DType codes = DType::kF8E4M3;
    c.require("dh_columns", args.dh_columns, {codes}, {"M/128+E", "P", "ceil(I/128)*128", "128"});
    c.require("dh_columns_scale", args.dh_columns_scale, {DType::kF32},
              {"M/128+E", "P", "ceil(I/128)*128"});
    c.require("pa_columns", args.pa_columns, {codes}, {"M/128+E", "1", "ceil(I/128)*128", "128"});
    c.require("pa_columns_scale", args.pa_columns_scale, {DType::kF32},
              {"M/128+E", "1", "ceil(I/128)*128"});
    c.absent("dh", args.dh, "used only without dh_columns");
    c.absent("pa", args.pa, "used only without dh_columns");
  } else {
    c.require("dh", args.dh, {result}, {"M", "P", "I"});
    c.require("pa", args.pa, {result}, {"M", "I"});
    for (const Tensor& columns : {args.dh_columns_scale, args.pa_columns, args.pa_columns_scale}) {
      c.absent("pa_columns", columns, "used only with dh_columns");
    }
  }
  if (args.dh_q.given()) {
    c.require("dh_q", args.dh_q, {DType::kF8E4M3}, {"M", "P", "I"});
    c.require("dh_scale", args.dh_scale, {DType::kF32}, {"M", "P", "ceil(I/128)"});
  } else {
    c.absent("dh_scale", args.dh_scale, "used only with dh_q");
  }
  c.require("d_weights", args.d_weights, {DType::kF32}, {"T", "K"});
  return c.status();
}

Status check(const ExpertUpBackwardArgs& args) {
  Checker c("expert_up_backward");
  const DType operands = args.dh.dtype;
  c.let("P", args.up.given() ? 2 : 1);
  c.require("dh", args.dh, {DType::kF32, DType::kBF16, DType::kF8E4M3}, {"M", "P", "I"});
  c.require("gate", args.gate, {operands}, {"E", "H", "I"});
  c.optional("up", args.up, {operands}, {"E", "H", "I"});
  let_scale_blocks(c);
  if (operands == DType::kF8E4M3) {
    c.require("dh_scale", args.dh_scale, {DType::kF32}, {"M", "P", "ceil(I/128)"});
    c.require("gate_scale", args.gate_scale, {DType::kF32}, {"E", "ceil(H/128)", "ceil(I/128)"});
    if (args.up.given()) {
      c.require("up_scale", args.up_scale, {DType::kF32}, {"E", "ceil(H/128)", "ceil(I/128)"});
    } else {
      c.absent("up_scale", args.up_scale, "used only with up");
    }
  } else {
    c.absent("dh_scale", args.dh_scale, "used only when dh is float8_e4m3fn");
    c.absent("gate_scale", args.gate_scale, "used only when gate is float8_e4m3fn");
    c.absent("up_scale", args.up_scale, "used only when up is float8_e4m3fn");
  }
  check_offsets(c, args.offsets);
  c.require("dx_rows", args.dx_rows, {operands == DType::kF32 ? DType::kF32 : DType::kBF16},
            {"M", "H"});
  return c.status();
}

}  // namespace dropless
