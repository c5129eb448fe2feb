#include "ffi/handler_cuda.h"
#include "ffi/route.h"

namespace dropless::binding {

DROPLESS_CUDA_HANDLER(route, Route)
DROPLESS_CUDA_HANDLER(route_backward, RouteBackward)
DROPLESS_CUDA_HANDLER(plan, Plan)

}  // namespace dropless::binding
