#include "ffi/handler_cpu.h"
#include "ffi/route.h"

namespace dropless::binding {

DROPLESS_CPU_HANDLER(route, Route)
DROPLESS_CPU_HANDLER(route_backward, RouteBackward)
DROPLESS_CPU_HANDLER(plan, Plan)
DROPLESS_CPU_HANDLER(router_terms, RouterTerms)
DROPLESS_CPU_HANDLER(route_of_terms, RouteOfTerms)
DROPLESS_CPU_HANDLER(route_backward_to_terms, RouteBackwardToTerms)

}  // namespace dropless::binding
