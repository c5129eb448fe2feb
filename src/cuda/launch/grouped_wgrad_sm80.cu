#include "cuda/launch/grouped_wgrad_block.cuh"

namespace dropless::cuda {

Status launch_grouped_wgrad_sm80(const GroupedWgradArgs& args, Stream stream) {
  return launch_grouped_wgrad_block<__nv_bfloat16>(args, stream);
}

}  // namespace dropless::cuda
