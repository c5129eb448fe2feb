#include "cuda/launch/expert_up_sm90.cuh"

namespace dropless::cuda {

template Status launch_expert_up_major<Major::kMn>(const ExpertUpArgs&, Stream);

Status launch_expert_up_sm90(const ExpertUpArgs& args, Stream stream) {
  return args.weights_transposed ? launch_expert_up_major<Major::kK>(args, stream)
                                 : launch_expert_up_major<Major::kMn>(args, stream);
}

}  // namespace dropless::cuda
