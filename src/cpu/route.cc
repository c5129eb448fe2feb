#include "dropless/route.h"

namespace dropless::cpu {

Status route(const RouteArgs& args, Executor& /*executor*/) { return reference::route(args); }

Status route_backward(const RouteBackwardArgs& args, Executor& /*executor*/) {
  return reference::route_backward(args);
}

}  // namespace dropless::cpu
