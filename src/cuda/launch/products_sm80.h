// The grouped products that run on every GPU since sm_80: bfloat16 (sm80) and float32 (f32)
// operands of any size and alignment. Args are checked, results are not empty; the contraction may
// be. Rows are gathered by the kernels, so no call needs a copy of them.
#pragma once

#include "dropless/cuda.h"

namespace dropless::cuda {

Status launch_grouped_gemm_sm80(const GroupedGemmArgs& args, Stream stream);
Status launch_grouped_gemm_f32(const GroupedGemmArgs& args, Stream stream);

Status launch_grouped_wgrad_sm80(const GroupedWgradArgs& args, Stream stream);
Status launch_grouped_wgrad_f32(const GroupedWgradArgs& args, Stream stream);

Status launch_expert_up_sm80(const ExpertUpArgs& args, Stream stream);
Status launch_expert_up_f32(const ExpertUpArgs& args, Stream stream);

// row_sums [ceil(I / kDownBackwardTileCols), M] is scratch.
Status launch_expert_down_backward_sm80(const ExpertDownBackwardArgs& args, float* row_sums,
                                        Stream stream);
Status launch_expert_down_backward_f32(const ExpertDownBackwardArgs& args, float* row_sums,
                                       Stream stream);

Status launch_expert_up_backward_sm80(const ExpertUpBackwardArgs& args, Stream stream);
Status launch_expert_up_backward_f32(const ExpertUpBackwardArgs& args, Stream stream);

}  // namespace dropless::cuda
