#include "ffi/handler_cpu.h"
#include "ffi/route.h"

namespace dropless::binding {

DROPLESS_CPU_HANDLER(route, Route)
DROPLESS_CPU_HANDLER(route_backward, RouteBackward)
DROPLESS_CPU_HANDLER(plan, Plan)

}  // namespace dropless::binding
