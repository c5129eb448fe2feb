#include "ffi/combine.h"
#include "ffi/handler_cuda.h"

namespace dropless::binding {

DROPLESS_CUDA_HANDLER(permute, Permute)
DROPLESS_CUDA_HANDLER(combine, Combine)
DROPLESS_CUDA_HANDLER(combine_backward, CombineBackward)
DROPLESS_CUDA_HANDLER(group_sum, GroupSum)

}  // namespace dropless::binding
