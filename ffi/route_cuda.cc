#include "ffi/handler_cuda.h"
#include "ffi/route.h"

namespace dropless::binding {

DROPLESS_CUDA_HANDLER(route, Route)
DROPLESS_CUDA_HANDLER(route_backward, RouteBackward)
DROPLESS_CUDA_HANDLER(plan, Plan)
DROPLESS_CUDA_HANDLER(router_terms, RouterTerms)
DROPLESS_CUDA_HANDLER(route_of_terms, RouteOfTerms)
DROPLESS_CUDA_HANDLER(route_backward_to_terms, RouteBackwardToTerms)

}  // namespace dropless::binding
