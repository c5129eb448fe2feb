// Operands, results and attributes of permute, combine, combine_backward and group_sum.
#pragma once

#include <utility>

#include "dropless/combine.h"
#include "ffi/common.h"

namespace dropless::binding {

struct Permute {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // x [T, H]
        .template Arg<ffi::AnyBuffer>()  // slot_of_row [M]
        .template Arg<ffi::AnyBuffer>()  // row_of_slot [T, K] or (0,)
        .template Ret<ffi::AnyBuffer>()  // rows [M, H]
        .template Attr<int64_t>("experts_per_token");
  }

  static PermuteArgs decode(Decoder& d, In x, In slot_of_row, In row_of_slot, Out rows,
                            int64_t experts_per_token) {
    PermuteArgs args;
    args.row_of_slot = d.optional_in("row_of_slot", row_of_slot);
    args.x = d.in("x", x);
    args.slot_of_row = d.in("slot_of_row", slot_of_row);
    args.experts_per_token = experts_per_token;
    args.rows = d.out("rows", rows);
    return args;
  }
};

struct Combine {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()   // rows [M, H]
        .template Arg<ffi::AnyBuffer>()   // row_of_slot [T, K]
        .template Arg<ffi::AnyBuffer>()   // weights [T, K] or (0,)
        .template Ret<ffi::AnyBuffer>();  // out [T, H]
  }

  static CombineArgs decode(Decoder& d, In rows, In row_of_slot, In weights, Out out) {
    CombineArgs args;
    args.rows = d.in("rows", rows);
    args.row_of_slot = d.in("row_of_slot", row_of_slot);
    args.weights = d.optional_in("weights", weights);
    args.out = d.out("out", out);
    return args;
  }
};

struct CombineBackward {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()   // dy [T, H]
        .template Arg<ffi::AnyBuffer>()   // rows [M, H]
        .template Arg<ffi::AnyBuffer>()   // row_of_slot [T, K]
        .template Arg<ffi::AnyBuffer>()   // slot_of_row [M]
        .template Arg<ffi::AnyBuffer>()   // weights [T, K]
        .template Ret<ffi::AnyBuffer>()   // d_rows [M, H]
        .template Ret<ffi::AnyBuffer>();  // d_weights [T, K]
  }

  static CombineBackwardArgs decode(Decoder& d, In dy, In rows, In row_of_slot, In slot_of_row,
                                    In weights, Out d_rows, Out d_weights) {
    CombineBackwardArgs args;
    args.dy = d.in("dy", dy);
    args.rows = d.in("rows", rows);
    args.row_of_slot = d.in("row_of_slot", row_of_slot);
    args.slot_of_row = d.in("slot_of_row", slot_of_row);
    args.weights = d.in("weights", weights);
    args.d_rows = d.out("d_rows", d_rows);
    args.d_weights = d.out("d_weights", d_weights);
    return args;
  }
};

struct GroupSum {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // x [M or T, P, N]
        .template Arg<ffi::AnyBuffer>()  // slot_of_row [M] or (0,)
        .template Arg<ffi::AnyBuffer>()  // weights [T, K] or (0,)
        .template Arg<ffi::AnyBuffer>()  // offsets [E+1]
        .template Ret<ffi::AnyBuffer>()  // out [E, P, N]
        .template Attr<int32_t>("gather")
        .template Attr<int64_t>("experts_per_token");
  }

  static GroupSumArgs decode(Decoder& d, In x, In slot_of_row, In weights, In offsets, Out out,
                             int32_t gather, int64_t experts_per_token) {
    GroupSumArgs args;
    args.x = d.in("x", x);
    args.weights = d.optional_in("weights", weights);
    // Where the map is needed, shape (0,) means M = 0 rather than "absent".
    args.slot_of_row = gather != 0 || args.weights.given()
                           ? d.in("slot_of_row", slot_of_row)
                           : d.optional_in("slot_of_row", slot_of_row);
    args.offsets = d.in("offsets", offsets);
    args.gather = gather != 0;
    args.experts_per_token = experts_per_token;
    args.out = d.out("out", out);
    return args;
  }
};

}  // namespace dropless::binding
