#include "ffi/grouped_gemm.h"
#include "ffi/handler_cpu.h"

namespace dropless::binding {

DROPLESS_CPU_HANDLER(grouped_gemm, GroupedGemm)
DROPLESS_CPU_HANDLER(grouped_wgrad, GroupedWgrad)

}  // namespace dropless::binding
