#include "cuda/launch/expert_up_sm90.cuh"

namespace dropless::cuda {

template Status launch_expert_up_major<Major::kMn>(const ExpertUpArgs&, ConstTensor, Stream);

Status launch_expert_up_sm90(const ExpertUpArgs& args, ConstTensor rows, Stream stream) {
  return args.weights_transposed ? launch_expert_up_major<Major::kK>(args, rows, stream)
                                 : launch_expert_up_major<Major::kMn>(args, rows, stream);
}

}  // namespace dropless::cuda
