#include "cuda/launch/grouped_gemm_sm90.cuh"

namespace dropless::cuda {

template Status launch_grouped_gemm_all<Major::kMn, __nv_bfloat16>(const GroupedGemmArgs&, int,
                                                                   Stream);

Status launch_grouped_gemm_sm90(const GroupedGemmArgs& args, int tile, Stream stream) {
  if (args.out.dtype == DType::kF32) {
    return args.rhs_transposed ? launch_grouped_gemm_all<Major::kK, float>(args, tile, stream)
                               : launch_grouped_gemm_all<Major::kMn, float>(args, tile, stream);
  }
  return args.rhs_transposed
             ? launch_grouped_gemm_all<Major::kK, __nv_bfloat16>(args, tile, stream)
             : launch_grouped_gemm_all<Major::kMn, __nv_bfloat16>(args, tile, stream);
}

}  // namespace dropless::cuda
