// The products over experts in FP8: what the public functions call for float8 operands.
#pragma once

#include "dropless/cuda.h"

namespace dropless::cuda {

// Args are checked.
Status grouped_gemm_fp8(const GroupedGemmArgs& args, Stream stream);
Status expert_up_fp8(const ExpertUpArgs& args, Tensor workspace, Stream stream);
Status expert_down_backward_fp8(const ExpertDownBackwardArgs& args, Tensor workspace,
                                Stream stream);
Status expert_up_backward_fp8(const ExpertUpBackwardArgs& args, Stream stream);

}  // namespace dropless::cuda
