// Operands, results and attributes of grouped_gemm and grouped_wgrad.
#pragma once

#include <utility>

#include "dropless/grouped_gemm.h"
#include "ffi/common.h"

namespace dropless::binding {

struct GroupedGemm {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // lhs [M, Kc]
        .template Arg<ffi::AnyBuffer>()  // lhs_scale [M, ceil(Kc/128)] or (0,)
        .template Arg<ffi::AnyBuffer>()  // rhs [E, Kc, N] or [E, N, Kc]
        .template Arg<ffi::AnyBuffer>()  // rhs_scale, two axes in blocks of 128, or (0,)
        .template Arg<ffi::AnyBuffer>()  // bias [E, N] or (0,)
        .template Arg<ffi::AnyBuffer>()  // offsets [E+1]
        .template Ret<ffi::AnyBuffer>()  // out [M, N]
        .template Attr<int32_t>("rhs_transposed")
        .template Attr<int32_t>("num_sms");
  }

  static GroupedGemmArgs decode(Decoder& d, In lhs, In lhs_scale, In rhs, In rhs_scale, In bias,
                                In offsets, Out out, int32_t rhs_transposed, int32_t num_sms) {
    GroupedGemmArgs args;
    d.num_sms(num_sms);
    args.lhs = d.in("lhs", lhs);
    args.lhs_scale = d.optional_in("lhs_scale", lhs_scale);
    args.rhs = d.in("rhs", rhs);
    args.rhs_scale = d.optional_in("rhs_scale", rhs_scale);
    args.bias = d.optional_in("bias", bias);
    args.offsets = d.in("offsets", offsets);
    args.rhs_transposed = rhs_transposed != 0;
    args.out = d.out("out", out);
    return args;
  }
};

struct GroupedWgrad {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // x [M or T, Kc] or [B, 1, C, 128]
        .template Arg<ffi::AnyBuffer>()  // x_scale [B, 1, C] or (0,)
        .template Arg<ffi::AnyBuffer>()  // dy [M or T, P, N] or [B, P, C, 128]
        .template Arg<ffi::AnyBuffer>()  // dy_scale [B, P, C] or (0,)
        .template Arg<ffi::AnyBuffer>()  // slot_of_row [M] or (0,)
        .template Arg<ffi::AnyBuffer>()  // offsets [E+1]
        .template Arg<ffi::AnyBuffer>()  // into0 [E, Kc, N], aliased to dw0, or (0,)
        .template Arg<ffi::AnyBuffer>()  // into1 [E, Kc, N], aliased to dw1, or (0,)
        .template Ret<ffi::AnyBuffer>()  // dw0 [E, Kc, N]
        .template Ret<ffi::AnyBuffer>()  // dw1 [E, Kc, N], or (0,) if P is 1
        .template Ret<ffi::AnyBuffer>()  // workspace
        .template Attr<int32_t>("gather")
        .template Attr<int64_t>("experts_per_token")
        .template Attr<int32_t>("fp8")
        .template Attr<int32_t>("scale_rounding")
        .template Attr<int32_t>("num_sms");
  }

  static GroupedWgradArgs decode(Decoder& d, In x, In x_scale, In dy, In dy_scale, In slot_of_row,
                                 In offsets, In into0, In into1, Out dw0, Out dw1, Out workspace,
                                 int32_t gather, int64_t experts_per_token, int32_t fp8,
                                 int32_t scale_rounding, int32_t num_sms) {
    GroupedWgradArgs args;
    d.num_sms(num_sms);
    d.workspace(workspace);
    args.x = d.in("x", x);
    args.x_scale = d.optional_in("x_scale", x_scale);
    args.dy = d.in("dy", dy);
    args.dy_scale = d.optional_in("dy_scale", dy_scale);
    // Where the map is needed, shape (0,) means M = 0 rather than "absent".
    args.slot_of_row =
        gather != 0 ? d.in("slot_of_row", slot_of_row) : d.optional_in("slot_of_row", slot_of_row);
    args.offsets = d.in("offsets", offsets);
    args.gather = static_cast<Gather>(gather);
    args.experts_per_token = experts_per_token;
    args.fp8 = fp8 != 0;
    args.scale_rounding = static_cast<ScaleRounding>(scale_rounding);
    args.dw[0] = d.out("dw0", dw0);
    args.dw[1] = d.optional_out("dw1", dw1);
    const ConstTensor into[2] = {d.optional_in("into0", into0), d.optional_in("into1", into1)};
    args.accumulate = into[0].given();
    for (int p = 0; p < 2; ++p) {
      const bool aliased = into[p].data == args.dw[p].data;
      const bool wanted = args.accumulate && args.dw[p].given();
      if (into[p].given() != wanted || (wanted && args.dw[p].size() > 0 && !aliased)) {
        d.fail("into0 and into1 must be given for every dw or for none, and be aliased to them");
      }
    }
    return args;
  }
};

}  // namespace dropless::binding
