#include "cuda/launch/expert_up_sm90.cuh"

namespace dropless::cuda {

Status launch_expert_up_sm90(const ExpertUpArgs& args, ConstTensor rows, int tile, Stream stream) {
  return launch_expert_up_all<Major::kMn, ActivationKind::kSilu>(args, rows, tile, stream);
}

}  // namespace dropless::cuda
