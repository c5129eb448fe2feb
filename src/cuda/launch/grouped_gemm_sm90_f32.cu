#include "cuda/launch/grouped_gemm_sm90.cuh"

namespace dropless::cuda {

template Status launch_grouped_gemm_all<Major::kMn, float>(const GroupedGemmArgs&, int, Stream);
template Status launch_grouped_gemm_all<Major::kK, float>(const GroupedGemmArgs&, int, Stream);

}  // namespace dropless::cuda
