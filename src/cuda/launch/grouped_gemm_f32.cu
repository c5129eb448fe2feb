#include "cuda/launch/launch_sm80.cuh"

namespace dropless::cuda {

template Status launch_plain_product<float, Major::kK>(const char*, const PlainParams<float>&,
                                                       Stream);
template Status launch_plain_product<float, Major::kMn>(const char*, const PlainParams<float>&,
                                                        Stream);

Status launch_grouped_gemm_f32(const GroupedGemmArgs& args, Stream stream) {
  return launch_grouped_gemm_block<float>(args, stream);
}

Status launch_expert_up_backward_f32(const ExpertUpBackwardArgs& args, Stream stream) {
  return launch_expert_up_backward_block<float>(args, stream);
}

}  // namespace dropless::cuda
