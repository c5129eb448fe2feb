#include "dropless/combine.h"

namespace dropless::cpu {

Status permute(const PermuteArgs& args, Executor& /*executor*/) { return reference::permute(args); }

}  // namespace dropless::cpu
