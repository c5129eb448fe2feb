// Operands, results and attributes of route, route_backward and plan.
#pragma once

#include <utility>

#include "dropless/route.h"
#include "dropless/router_terms.h"
#include "ffi/common.h"

namespace dropless::binding {

inline PlanOutputs decode_plan(Decoder& d, Out& counts, Out& offsets, Out& slot_of_row,
                               Out& row_of_slot) {
  PlanOutputs plan;
  plan.counts = d.out("counts", counts);
  plan.offsets = d.out("offsets", offsets);
  plan.slot_of_row = d.out("slot_of_row", slot_of_row);
  plan.row_of_slot = d.out("row_of_slot", row_of_slot);
  return plan;
}

// Attributes of the weights, which route and route_backward share.
inline RouterOptions decode_weights(Decoder& d, int32_t score, int32_t score_before_topk,
                                    int32_t renormalize, float renormalize_eps,
                                    int32_t renormalize_clamp, float scale) {
  if (score < 0 || score > static_cast<int32_t>(RouterScore::kIdentity)) {
    d.fail("score must be 0 (softmax), 1 (sigmoid), 2 (sqrt-softplus) or 3 (identity), but is " +
           std::to_string(score));
  }
  RouterOptions options;
  options.score = static_cast<RouterScore>(score);
  options.score_before_topk = score_before_topk != 0;
  options.renormalize = renormalize != 0;
  options.renormalize_eps = renormalize_eps;
  options.renormalize_clamp = renormalize_clamp != 0;
  options.scale = scale;
  return options;
}

template <class Binding>
auto bind_weights(Binding binding) {
  return std::move(binding)
      .template Attr<int32_t>("score")
      .template Attr<int32_t>("score_before_topk")
      .template Attr<int32_t>("renormalize")
      .template Attr<float>("renormalize_eps")
      .template Attr<int32_t>("renormalize_clamp")
      .template Attr<float>("scale");
}

struct Plan {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // ids [T, K]
        .template Ret<ffi::AnyBuffer>()  // counts [E]
        .template Ret<ffi::AnyBuffer>()  // offsets [E+1]
        .template Ret<ffi::AnyBuffer>()  // slot_of_row [M]
        .template Ret<ffi::AnyBuffer>()  // row_of_slot [T, K]
        .template Ret<ffi::AnyBuffer>()  // workspace
        .template Attr<int64_t>("capacity");
  }

  static PlanArgs decode(Decoder& d, In ids, Out counts, Out offsets, Out slot_of_row,
                         Out row_of_slot, Out workspace, int64_t capacity) {
    PlanArgs args;
    d.workspace(workspace);
    args.ids = d.in("ids", ids);
    args.capacity = capacity;
    args.plan = decode_plan(d, counts, offsets, slot_of_row, row_of_slot);
    return args;
  }
};

struct Route {
  template <class Binding>
  static auto bind(Binding binding) {
    return bind_rest(std::move(binding).template Arg<ffi::AnyBuffer>());  // logits [T, E]
  }

  // What follows the logits.
  template <class Binding>
  static auto bind_rest(Binding binding) {
    return bind_weights(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()   // selection_bias [E] or (0,)
                            .template Arg<ffi::AnyBuffer>()   // mask [T] or (0,)
                            .template Arg<ffi::AnyBuffer>()   // forced_ids [T, K] or (0,)
                            .template Ret<ffi::AnyBuffer>()   // ids [T, K]
                            .template Ret<ffi::AnyBuffer>()   // weights [T, K]
                            .template Ret<ffi::AnyBuffer>()   // prob_sum [E]
                            .template Ret<ffi::AnyBuffer>()   // sums [2]
                            .template Ret<ffi::AnyBuffer>()   // counters [2]
                            .template Ret<ffi::AnyBuffer>()   // counts [E]
                            .template Ret<ffi::AnyBuffer>()   // offsets [E+1]
                            .template Ret<ffi::AnyBuffer>()   // slot_of_row [M]
                            .template Ret<ffi::AnyBuffer>()   // row_of_slot [T, K]
                            .template Ret<ffi::AnyBuffer>())  // workspace
        .template Attr<int32_t>("num_groups")
        .template Attr<int32_t>("groups_kept")
        .template Attr<int32_t>("group_score_experts")
        .template Attr<int32_t>("group_mask_zero")
        .template Attr<int64_t>("capacity");
  }

  static RouteArgs decode(Decoder& d, In logits, In selection_bias, In mask, In forced_ids, Out ids,
                          Out weights, Out prob_sum, Out sums, Out counters, Out counts,
                          Out offsets, Out slot_of_row, Out row_of_slot, Out workspace,
                          int32_t score, int32_t score_before_topk, int32_t renormalize,
                          float renormalize_eps, int32_t renormalize_clamp, float scale,
                          int32_t num_groups, int32_t groups_kept, int32_t group_score_experts,
                          int32_t group_mask_zero, int64_t capacity) {
    RouteArgs args;
    d.workspace(workspace);
    args.options = decode_weights(d, score, score_before_topk, renormalize, renormalize_eps,
                                  renormalize_clamp, scale);
    args.options.num_groups = num_groups;
    args.options.groups_kept = groups_kept;
    args.options.group_score_experts = group_score_experts;
    args.options.group_mask_zero = group_mask_zero != 0;
    args.logits = d.in("logits", logits);
    args.selection_bias = d.optional_in("selection_bias", selection_bias);
    args.mask = d.optional_in("mask", mask);
    args.forced_ids = d.optional_in("forced_ids", forced_ids);
    args.capacity = capacity;
    args.ids = d.out("ids", ids);
    args.weights = d.out("weights", weights);
    args.prob_sum = d.out("prob_sum", prob_sum);
    args.sums = d.out("sums", sums);
    args.counters = d.out("counters", counters);
    args.plan = decode_plan(d, counts, offsets, slot_of_row, row_of_slot);
    return args;
  }
};

struct RouteBackward {
  template <class Binding>
  static auto bind(Binding binding) {
    return bind_weights(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()    // logits [T, E]
                            .template Arg<ffi::AnyBuffer>()    // ids [T, K]
                            .template Arg<ffi::AnyBuffer>()    // d_weights [T, K]
                            .template Arg<ffi::AnyBuffer>()    // d_prob_sum [E]
                            .template Arg<ffi::AnyBuffer>()    // d_sums [2]
                            .template Ret<ffi::AnyBuffer>());  // d_logits [T, E]
  }

  static RouteBackwardArgs decode(Decoder& d, In logits, In ids, In d_weights, In d_prob_sum,
                                  In d_sums, Out d_logits, int32_t score, int32_t score_before_topk,
                                  int32_t renormalize, float renormalize_eps,
                                  int32_t renormalize_clamp, float scale) {
    RouteBackwardArgs args;
    args.options = decode_weights(d, score, score_before_topk, renormalize, renormalize_eps,
                                  renormalize_clamp, scale);
    args.logits = d.in("logits", logits);
    args.ids = d.in("ids", ids);
    args.d_weights = d.in("d_weights", d_weights);
    args.d_prob_sum = d.in("d_prob_sum", d_prob_sum);
    args.d_sums = d.in("d_sums", d_sums);
    args.d_logits = d.out("d_logits", d_logits);
    return args;
  }
};

struct RouterTerms {
  template <class Binding>
  static auto bind(Binding binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()  // a [R, C]
        .template Ret<ffi::AnyBuffer>()  // terms [R, 3, C]
        .template Ret<ffi::AnyBuffer>()  // pairs [R, 6, C] or (0,)
        .template Attr<int32_t>("side");
  }

  static RouterTermsArgs decode(Decoder& d, In a, Out terms, Out pairs, int32_t side) {
    RouterTermsArgs args;
    args.a = d.in("a", a);
    args.side = static_cast<ProductSide>(side);
    args.terms = d.out("terms", terms);
    args.pairs = d.optional_out("pairs", pairs);
    return args;
  }
};

struct RouteOfTerms {
  template <class Binding>
  static auto bind(Binding binding) {
    return Route::bind_rest(std::move(binding)
                                .template Arg<ffi::AnyBuffer>()    // terms [T, 3, E]
                                .template Arg<ffi::AnyBuffer>()    // logit_bias [E] or (0,)
                                .template Ret<ffi::AnyBuffer>());  // logits [T, E]
  }

  template <class... Rest>
  static RouteOfTermsArgs decode(Decoder& d, In terms, In logit_bias, Out logits, In selection_bias,
                                 In mask, In forced_ids, Rest... rest) {
    RouteOfTermsArgs args;
    // A result's view has an operand's form.
    args.route = Route::decode(d, *logits, selection_bias, mask, forced_ids, rest...);
    args.terms = d.in("terms", terms);
    args.logit_bias = d.optional_in("logit_bias", logit_bias);
    args.logits = d.out("logits", logits);
    return args;
  }
};

struct RouteBackwardToTerms {
  template <class Binding>
  static auto bind(Binding binding) {
    return bind_weights(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()    // logits [T, E]
                            .template Arg<ffi::AnyBuffer>()    // ids [T, K]
                            .template Arg<ffi::AnyBuffer>()    // d_weights [T, K]
                            .template Arg<ffi::AnyBuffer>()    // d_prob_sum [E] or (0,)
                            .template Arg<ffi::AnyBuffer>()    // d_sums [2] or (0,)
                            .template Ret<ffi::AnyBuffer>()    // d_logits [T, E] or (0,)
                            .template Ret<ffi::AnyBuffer>()    // d_terms [T, 3, E]
                            .template Ret<ffi::AnyBuffer>());  // d_pairs [T, 6, E]
  }

  static RouteBackwardToTermsArgs decode(Decoder& d, In logits, In ids, In d_weights, In d_prob_sum,
                                         In d_sums, Out d_logits, Out d_terms, Out d_pairs,
                                         int32_t score, int32_t score_before_topk,
                                         int32_t renormalize, float renormalize_eps,
                                         int32_t renormalize_clamp, float scale) {
    RouteBackwardToTermsArgs args;
    args.route.options = decode_weights(d, score, score_before_topk, renormalize, renormalize_eps,
                                        renormalize_clamp, scale);
    args.route.logits = d.in("logits", logits);
    args.route.ids = d.in("ids", ids);
    args.route.d_weights = d.in("d_weights", d_weights);
    args.route.d_prob_sum = d.optional_in("d_prob_sum", d_prob_sum);
    args.route.d_sums = d.optional_in("d_sums", d_sums);
    args.route.d_logits = d.optional_out("d_logits", d_logits);
    args.d_terms = d.out("d_terms", d_terms);
    args.d_pairs = d.out("d_pairs", d_pairs);
    return args;
  }
};

}  // namespace dropless::binding
