#include "cuda/launch/expert_up_sm90.cuh"

namespace dropless::cuda {

template Status launch_expert_up_major<Major::kK>(const ExpertUpArgs&, Stream);

}  // namespace dropless::cuda
