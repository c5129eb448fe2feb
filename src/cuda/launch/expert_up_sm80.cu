#include "cuda/launch/launch_sm80.cuh"

namespace dropless::cuda {

Status launch_expert_up_sm80(const ExpertUpArgs& args, Stream stream) {
  return launch_expert_up_block<__nv_bfloat16>(args, stream);
}

}  // namespace dropless::cuda
