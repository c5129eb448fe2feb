#include "cuda/launch/launch_sm80.cuh"

namespace dropless::cuda {

Status launch_expert_up_f32(const ExpertUpArgs& args, Stream stream) {
  return launch_expert_up_block<float>(args, stream);
}

}  // namespace dropless::cuda
