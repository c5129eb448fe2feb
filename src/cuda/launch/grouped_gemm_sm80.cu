#include "cuda/launch/launch_sm80.cuh"

namespace dropless::cuda {

template Status launch_plain_product<__nv_bfloat16, Major::kK>(const char*,
                                                               const PlainParams<__nv_bfloat16>&,
                                                               Stream);
template Status launch_plain_product<__nv_bfloat16, Major::kMn>(const char*,
                                                                const PlainParams<__nv_bfloat16>&,
                                                                Stream);

Status launch_grouped_gemm_sm80(const GroupedGemmArgs& args, Stream stream) {
  return launch_grouped_gemm_block<__nv_bfloat16>(args, stream);
}

Status launch_expert_up_backward_sm80(const ExpertUpBackwardArgs& args, Stream stream) {
  return launch_expert_up_backward_block<__nv_bfloat16>(args, stream);
}

}  // namespace dropless::cuda
