#include "cuda/launch/grouped_wgrad_block.cuh"

namespace dropless::cuda {

Status launch_grouped_wgrad_f32(const GroupedWgradArgs& args, Stream stream) {
  return launch_grouped_wgrad_block<float>(args, stream);
}

}  // namespace dropless::cuda
