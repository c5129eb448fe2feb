#include "dropless/combine.h"

namespace dropless::cpu {

Status combine(const CombineArgs& args, Executor& /*executor*/) { return reference::combine(args); }

Status combine_backward(const CombineBackwardArgs& args, Executor& /*executor*/) {
  return reference::combine_backward(args);
}

}  // namespace dropless::cpu
