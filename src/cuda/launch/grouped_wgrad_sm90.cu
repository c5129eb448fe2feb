#include "cuda/launch/grouped_wgrad_sm90.cuh"

namespace dropless::cuda {

template Status launch_grouped_wgrad_all<__nv_bfloat16, false>(const GroupedWgradArgs&, int,
                                                               Stream);
template Status launch_grouped_wgrad_all<__nv_bfloat16, true>(const GroupedWgradArgs&, int, Stream);

Status launch_grouped_wgrad_sm90(const GroupedWgradArgs& args, int tile, Stream stream) {
  if (args.dw[0].dtype == DType::kBF16) {
    return args.accumulate ? launch_grouped_wgrad_all<__nv_bfloat16, true>(args, tile, stream)
                           : launch_grouped_wgrad_all<__nv_bfloat16, false>(args, tile, stream);
  }
  return args.accumulate ? launch_grouped_wgrad_all<float, true>(args, tile, stream)
                         : launch_grouped_wgrad_all<float, false>(args, tile, stream);
}

}  // namespace dropless::cuda
