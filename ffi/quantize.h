// Operands, results and attributes of quantize_rows and quantize_weight.
#pragma once

#include <utility>

#include "dropless/quantize.h"
#include "ffi/common.h"

namespace dropless::binding {

struct QuantizeRows {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // x [R, C]
        .template Ret<ffi::AnyBuffer>()  // q [R, C]
        .template Ret<ffi::AnyBuffer>()  // scale [R, ceil(C/128)]
        .template Attr<int32_t>("scale_rounding");
  }

  static QuantizeRowsArgs decode(Decoder& d, In x, Out q, Out scale, int32_t scale_rounding) {
    QuantizeRowsArgs args;
    args.x = d.in("x", x);
    args.scale_rounding = static_cast<ScaleRounding>(scale_rounding);
    args.q = d.out("q", q);
    args.scale = d.out("scale", scale);
    return args;
  }
};

struct QuantizeWeight {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // w [E, in, out]
        .template Ret<ffi::AnyBuffer>()  // q [E, in, out]
        .template Ret<ffi::AnyBuffer>()  // q_t [E, out, in]
        .template Ret<ffi::AnyBuffer>()  // scale [E, ceil(in/128), ceil(out/128)]
        .template Ret<ffi::AnyBuffer>()  // scale_t [E, ceil(out/128), ceil(in/128)]
        .template Attr<int32_t>("scale_rounding");
  }

  static QuantizeWeightArgs decode(Decoder& d, In w, Out q, Out q_t, Out scale, Out scale_t,
                                   int32_t scale_rounding) {
    QuantizeWeightArgs args;
    args.w = d.in("w", w);
    args.scale_rounding = static_cast<ScaleRounding>(scale_rounding);
    args.q = d.out("q", q);
    args.q_t = d.out("q_t", q_t);
    args.scale = d.out("scale", scale);
    args.scale_t = d.out("scale_t", scale_t);
    return args;
  }
};

}  // namespace dropless::binding
