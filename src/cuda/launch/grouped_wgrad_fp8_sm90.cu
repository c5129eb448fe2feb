#include "cuda/launch/grouped_wgrad_fp8_sm90.cuh"

namespace dropless::cuda {

Status launch_grouped_wgrad_fp8_sm90(const GroupedWgradArgs& args, int64_t rows,
                                     const WgradFp8Scratch& scratch, int tile, Stream stream) {
  if (args.dw[0].dtype == DType::kBF16) {
    return args.accumulate ? launch_grouped_wgrad_fp8_all<__nv_bfloat16, true>(args, rows, scratch,
                                                                               tile, stream)
                           : launch_grouped_wgrad_fp8_all<__nv_bfloat16, false>(args, rows, scratch,
                                                                                tile, stream);
  }
  return args.accumulate
             ? launch_grouped_wgrad_fp8_all<float, true>(args, rows, scratch, tile, stream)
             : launch_grouped_wgrad_fp8_all<float, false>(args, rows, scratch, tile, stream);
}

}  // namespace dropless::cuda
