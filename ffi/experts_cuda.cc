#include "ffi/experts.h"
#include "ffi/handler_cuda.h"

namespace dropless::binding {

DROPLESS_CUDA_HANDLER(expert_up, ExpertUp)
DROPLESS_CUDA_HANDLER(expert_down_backward, ExpertDownBackward)
DROPLESS_CUDA_HANDLER(expert_up_backward, ExpertUpBackward)

}  // namespace dropless::binding
