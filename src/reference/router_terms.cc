#include "core/router_terms.h"

#include "core/exception_status.h"

namespace dropless::reference {

Status router_terms(const RouterTermsArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t columns = args.a.dims[1];
  for (int64_t r = 0; r < args.a.dims[0]; ++r) {
    uint16_t* pairs =
        args.pairs.given() ? args.pairs.as<uint16_t>() + r * kTermPairs * columns : nullptr;
    router::split_row(args.a.as<float>() + r * columns, columns, args.side,
                      args.terms.as<uint16_t>() + r * kTerms * columns, pairs);
  }
  return Status();
} catch (...) {
  return exception_status("router_terms");
}

Status route_of_terms(const RouteOfTermsArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  for (int64_t t = 0; t < args.logits.dims[0]; ++t) router::sum_terms(args, t);
  return route(args.route);
} catch (...) {
  return exception_status("route_of_terms");
}

Status route_backward_to_terms(const RouteBackwardToTermsArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const router::WholeBackward whole(args.route);
  if (Status status = route_backward(whole.args()); !status.ok()) return status;
  return router_terms({whole.args().d_logits, ProductSide::kLeft, args.d_terms, args.d_pairs});
} catch (...) {
  return exception_status("route_backward_to_terms");
}

}  // namespace dropless::reference
