#include "dropless/route.h"

namespace dropless::cpu {

Status plan(const PlanArgs& args, Executor& /*executor*/) { return reference::plan(args); }

}  // namespace dropless::cpu
