#include "dropless/combine.h"

namespace dropless::cpu {

Status group_sum(const GroupSumArgs& args, Executor& /*executor*/) {
  return reference::group_sum(args);
}

}  // namespace dropless::cpu
