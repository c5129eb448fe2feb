#include "core/router_terms.h"

#include "core/exception_status.h"
#include "cpu/chunks.h"

namespace dropless::cpu {

Status router_terms(const RouterTermsArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t rows = args.a.dims[0], columns = args.a.dims[1];
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
  for_chunks(executor, rows, rows_per_chunk(row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      uint16_t* pairs =
          args.pairs.given() ? args.pairs.as<uint16_t>() + r * kTermPairs * columns : nullptr;
      router::split_row(args.a.as<float>() + r * columns, columns, args.side,
                        args.terms.as<uint16_t>() + r * kTerms * columns, pairs);
    }
  });
  return Status();
} catch (...) {
  return exception_status("router_terms");
}

Status route_of_terms(const RouteOfTermsArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t row_bytes = args.logits.dims[1] * kTerms * static_cast<int64_t>(sizeof(float));
  const int64_t chunk = rows_per_chunk(row_bytes);
  for_chunks(executor, args.logits.dims[0], chunk, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) router::sum_terms(args, t);
  });
  return route(args.route, executor);
} catch (...) {
  return exception_status("route_of_terms");
}

Status route_backward_to_terms(const RouteBackwardToTermsArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const router::WholeBackward whole(args.route);
  if (Status status = route_backward(whole.args(), executor); !status.ok()) return status;
  return router_terms({whole.args().d_logits, ProductSide::kLeft, args.d_terms, args.d_pairs},
                      executor);
} catch (...) {
  return exception_status("route_backward_to_terms");
}

}  // namespace dropless::cpu
