#include "cuda/launch/expert_down_backward_block.cuh"

namespace dropless::cuda {

Status launch_expert_down_backward_sm80(const ExpertDownBackwardArgs& args, float* row_sums,
                                        Stream stream) {
  return launch_expert_down_backward_block<__nv_bfloat16>(args, row_sums, stream);
}

}  // namespace dropless::cuda
