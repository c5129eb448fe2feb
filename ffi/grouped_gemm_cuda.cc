#include "ffi/grouped_gemm.h"
#include "ffi/handler_cuda.h"

namespace dropless::binding {

DROPLESS_CUDA_HANDLER(grouped_gemm, GroupedGemm)
DROPLESS_CUDA_HANDLER(grouped_wgrad, GroupedWgrad)

}  // namespace dropless::binding
