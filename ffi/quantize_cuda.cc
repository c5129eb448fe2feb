#include "ffi/handler_cuda.h"
#include "ffi/quantize.h"

namespace dropless::binding {

DROPLESS_CUDA_HANDLER(quantize_rows, QuantizeRows)
DROPLESS_CUDA_HANDLER(quantize_weight, QuantizeWeight)

}  // namespace dropless::binding
