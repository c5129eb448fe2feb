#include "ffi/experts.h"
#include "ffi/handler_cpu.h"

namespace dropless::binding {

DROPLESS_CPU_HANDLER(expert_up, ExpertUp)
DROPLESS_CPU_HANDLER(expert_down_backward, ExpertDownBackward)
DROPLESS_CPU_HANDLER(expert_up_backward, ExpertUpBackward)

}  // namespace dropless::binding
