#include "ffi/handler_cpu.h"
#include "ffi/quantize.h"

namespace dropless::binding {

DROPLESS_CPU_HANDLER(quantize_rows, QuantizeRows)
DROPLESS_CPU_HANDLER(quantize_weight, QuantizeWeight)

}  // namespace dropless::binding
