#include "ffi/combine.h"
#include "ffi/handler_cpu.h"

namespace dropless::binding {

DROPLESS_CPU_HANDLER(permute, Permute)
DROPLESS_CPU_HANDLER(combine, Combine)
DROPLESS_CPU_HANDLER(combine_backward, CombineBackward)
DROPLESS_CPU_HANDLER(group_sum, GroupSum)

}  // namespace dropless::binding
