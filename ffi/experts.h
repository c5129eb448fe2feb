// Operands, results and attributes of expert_up, expert_down_backward and expert_up_backward.
#pragma once

#include <utility>

#include "dropless/experts.h"
#include "ffi/common.h"

namespace dropless::binding {

// The attributes of ActivationOptions, in the order that decode_activation takes them.
template <class Binding>
auto bind_activation(Binding binding) {
  return std::move(binding)
      .template Attr<int32_t>("activation")
      .template Attr<int32_t>("gated")
      .template Attr<float>("activation_slope")
      .template Attr<float>("gate_limit")
      .template Attr<float>("up_limit")
      .template Attr<float>("up_offset");
}

// check() judges the values; only what no enumerator stands for is refused here.
inline ActivationOptions decode_activation(Decoder& d, int32_t kind, int32_t gated, float slope,
                                           float gate_limit, float up_limit, float up_offset) {
  if (kind < static_cast<int32_t>(ActivationKind::kSilu) ||
      kind > static_cast<int32_t>(ActivationKind::kReluSquared)) {
    d.fail(
        "activation must be 0 (silu), 1 (gelu), 2 (gelu_tanh), 3 (relu) or 4 (relu_squared), but "
        "is " +
        std::to_string(kind));
  }
  return {static_cast<ActivationKind>(kind), gated != 0, slope, gate_limit, up_limit, up_offset};
}

struct ExpertUp {
  template <class Binding>
  static auto bind(Binding binding) {
    return bind_activation(
        std::move(binding)
            .template Arg<ffi::AnyBuffer>()  // x [T, H]
            .template Arg<ffi::AnyBuffer>()  // x_scale [T, ceil(H/128)] or (0,)
            .template Arg<ffi::AnyBuffer>()  // gate [E, H, I] or [E, I, H]
            .template Arg<ffi::AnyBuffer>()  // up, as gate, or (0,)
            .template Arg<ffi::AnyBuffer>()  // gate_scale, two axes in blocks of 128, or (0,)
            .template Arg<ffi::AnyBuffer>()  // up_scale, as gate_scale
            .template Arg<ffi::AnyBuffer>()  // gate_bias [E, I] or (0,)
            .template Arg<ffi::AnyBuffer>()  // up_bias [E, I] or (0,)
            .template Arg<ffi::AnyBuffer>()  // offsets [E+1]
            .template Arg<ffi::AnyBuffer>()  // slot_of_row [M]
            .template Ret<ffi::AnyBuffer>()  // h [M, P, I] or (0,)
            .template Ret<ffi::AnyBuffer>()  // h_scale [M, P, ceil(I/128)] or (0,)
            .template Ret<ffi::AnyBuffer>()  // a [M, I]
            .template Ret<ffi::AnyBuffer>()  // a_scale [M, ceil(I/128)] or (0,)
            .template Ret<ffi::AnyBuffer>()  // workspace
            .template Attr<int64_t>("experts_per_token")
            .template Attr<int32_t>("weights_transposed")
            .template Attr<int32_t>("scale_rounding")
            .template Attr<int32_t>("num_sms"));
  }

  static ExpertUpArgs decode(Decoder& d, In x, In x_scale, In gate, In up, In gate_scale,
                             In up_scale, In gate_bias, In up_bias, In offsets, In slot_of_row,
                             Out h, Out h_scale, Out a, Out a_scale, Out workspace,
                             int64_t experts_per_token, int32_t weights_transposed,
                             int32_t scale_rounding, int32_t num_sms, int32_t activation,
                             int32_t gated, float slope, float gate_limit, float up_limit,
                             float up_offset) {
    ExpertUpArgs args;
    d.num_sms(num_sms);
    d.workspace(workspace);
    args.x = d.in("x", x);
    args.x_scale = d.optional_in("x_scale", x_scale);
    args.gate = d.in("gate", gate);
    args.up = d.optional_in("up", up);
    args.gate_scale = d.optional_in("gate_scale", gate_scale);
    args.up_scale = d.optional_in("up_scale", up_scale);
    args.gate_bias = d.optional_in("gate_bias", gate_bias);
    args.up_bias = d.optional_in("up_bias", up_bias);
    args.offsets = d.in("offsets", offsets);
    args.slot_of_row = d.in("slot_of_row", slot_of_row);
    args.experts_per_token = experts_per_token;
    args.weights_transposed = weights_transposed != 0;
    args.activation =
        decode_activation(d, activation, gated, slope, gate_limit, up_limit, up_offset);
    args.scale_rounding = static_cast<ScaleRounding>(scale_rounding);
    args.h = d.optional_out("h", h);
    args.h_scale = d.optional_out("h_scale", h_scale);
    args.a = d.out("a", a);
    args.a_scale = d.optional_out("a_scale", a_scale);
    return args;
  }
};

struct ExpertDownBackward {
  template <class Binding>
  static auto bind(Binding binding) {
    return bind_activation(
        std::move(binding)
            .template Arg<ffi::AnyBuffer>()  // dy [T, H]
            .template Arg<ffi::AnyBuffer>()  // dy_scale [T, ceil(H/128)] or (0,)
            .template Arg<ffi::AnyBuffer>()  // down [E, I, H]
            .template Arg<ffi::AnyBuffer>()  // down_scale [E, ceil(I/128), ceil(H/128)] or (0,)
            .template Arg<ffi::AnyBuffer>()  // down_bias [E, H] or (0,)
            .template Arg<ffi::AnyBuffer>()  // h [M, P, I]
            .template Arg<ffi::AnyBuffer>()  // h_scale [M, P, ceil(I/128)] or (0,)
            .template Arg<ffi::AnyBuffer>()  // weights [T, K]
            .template Arg<ffi::AnyBuffer>()  // offsets [E+1]
            .template Arg<ffi::AnyBuffer>()  // slot_of_row [M]
            .template Ret<ffi::AnyBuffer>()  // dh [M, P, I] or (0,)
            .template Ret<ffi::AnyBuffer>()  // dh_q [M, P, I] or (0,)
            .template Ret<ffi::AnyBuffer>()  // dh_scale [M, P, ceil(I/128)] or (0,)
            .template Ret<ffi::AnyBuffer>()  // pa [M, I] or (0,)
            .template Ret<ffi::AnyBuffer>()  // dh_columns [B, P, C, 128] or (0,)
            .template Ret<ffi::AnyBuffer>()  // dh_columns_scale [B, P, C] or (0,)
            .template Ret<ffi::AnyBuffer>()  // pa_columns [B, 1, C, 128] or (0,)
            .template Ret<ffi::AnyBuffer>()  // pa_columns_scale [B, 1, C] or (0,)
            .template Ret<ffi::AnyBuffer>()  // d_weights [T, K]
            .template Ret<ffi::AnyBuffer>()  // workspace
            .template Attr<int32_t>("scale_rounding")
            .template Attr<int32_t>("num_sms"));
  }

  static ExpertDownBackwardArgs decode(Decoder& d, In dy, In dy_scale, In down, In down_scale,
                                       In down_bias, In h, In h_scale, In weights, In offsets,
                                       In slot_of_row, Out dh, Out dh_q, Out dh_scale, Out pa,
                                       Out dh_columns, Out dh_columns_scale, Out pa_columns,
                                       Out pa_columns_scale, Out d_weights, Out workspace,
                                       int32_t scale_rounding, int32_t num_sms, int32_t activation,
                                       int32_t gated, float slope, float gate_limit, float up_limit,
                                       float up_offset) {
    ExpertDownBackwardArgs args;
    d.num_sms(num_sms);
    d.workspace(workspace);
    args.dy = d.in("dy", dy);
    args.dy_scale = d.optional_in("dy_scale", dy_scale);
    args.down = d.in("down", down);
    args.down_scale = d.optional_in("down_scale", down_scale);
    args.down_bias = d.optional_in("down_bias", down_bias);
    args.h = d.in("h", h);
    args.h_scale = d.optional_in("h_scale", h_scale);
    args.weights = d.in("weights", weights);
    args.offsets = d.in("offsets", offsets);
    args.slot_of_row = d.in("slot_of_row", slot_of_row);
    args.activation =
        decode_activation(d, activation, gated, slope, gate_limit, up_limit, up_offset);
    args.scale_rounding = static_cast<ScaleRounding>(scale_rounding);
    args.dh_columns = d.optional_out("dh_columns", dh_columns);
    args.dh_columns_scale = d.optional_out("dh_columns_scale", dh_columns_scale);
    args.pa_columns = d.optional_out("pa_columns", pa_columns);
    args.pa_columns_scale = d.optional_out("pa_columns_scale", pa_columns_scale);
    // Without columns, shape (0,) means M = 0 rather than "absent".
    const bool columns = args.dh_columns.given();
    args.dh = columns ? d.optional_out("dh", dh) : d.out("dh", dh);
    args.dh_q = d.optional_out("dh_q", dh_q);
    args.dh_scale = d.optional_out("dh_scale", dh_scale);
    args.pa = columns ? d.optional_out("pa", pa) : d.out("pa", pa);
    args.d_weights = d.out("d_weights", d_weights);
    return args;
  }
};

struct ExpertUpBackward {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // dh [M, P, I]
        .template Arg<ffi::AnyBuffer>()  // dh_scale [M, P, ceil(I/128)] or (0,)
        .template Arg<ffi::AnyBuffer>()  // gate [E, H, I]
        .template Arg<ffi::AnyBuffer>()  // up [E, H, I] or (0,)
        .template Arg<ffi::AnyBuffer>()  // gate_scale [E, ceil(H/128), ceil(I/128)] or (0,)
        .template Arg<ffi::AnyBuffer>()  // up_scale, as gate_scale
        .template Arg<ffi::AnyBuffer>()  // offsets [E+1]
        .template Ret<ffi::AnyBuffer>()  // dx_rows [M, H]
        .template Attr<int32_t>("num_sms");
  }

  static ExpertUpBackwardArgs decode(Decoder& d, In dh, In dh_scale, In gate, In up, In gate_scale,
                                     In up_scale, In offsets, Out dx_rows, int32_t num_sms) {
    ExpertUpBackwardArgs args;
    d.num_sms(num_sms);
    args.dh = d.in("dh", dh);
    args.dh_scale = d.optional_in("dh_scale", dh_scale);
    args.gate = d.in("gate", gate);
    args.up = d.optional_in("up", up);
    args.gate_scale = d.optional_in("gate_scale", gate_scale);
    args.up_scale = d.optional_in("up_scale", up_scale);
    args.offsets = d.in("offsets", offsets);
    args.dx_rows = d.out("dx_rows", dx_rows);
    return args;
  }
};

}  // namespace dropless::binding
