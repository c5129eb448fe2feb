// Answers of the ops that have no CUDA kernel yet. Weak: a kernel's own definition takes their
// place.
#include <string>

#include "dropless/cuda.h"

#define DROPLESS_UNIMPLEMENTED(op, Args)                          \
  __attribute__((weak)) Status op(const Args&, Tensor, Stream) {  \
    return Status(StatusCode::kUnimplemented, #op                 \
                  ": the CUDA backend has no kernel for it yet; " \
                  "run it on the CPU");                           \
  }

namespace dropless::cuda {

DROPLESS_UNIMPLEMENTED(grouped_gemm, GroupedGemmArgs)
DROPLESS_UNIMPLEMENTED(grouped_wgrad, GroupedWgradArgs)
DROPLESS_UNIMPLEMENTED(expert_up, ExpertUpArgs)
DROPLESS_UNIMPLEMENTED(expert_down_backward, ExpertDownBackwardArgs)
DROPLESS_UNIMPLEMENTED(expert_up_backward, ExpertUpBackwardArgs)

}  // namespace dropless::cuda
