#include "cuda/launch/grouped_gemm_sm90.cuh"

namespace dropless::cuda {

template Status launch_grouped_gemm_all<Major::kK, __nv_bfloat16>(const GroupedGemmArgs&, int,
                                                                  Stream);

}  // namespace dropless::cuda
