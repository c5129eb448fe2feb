#include "cuda/launch/grouped_wgrad_sm90.cuh"

namespace dropless::cuda {

template Status launch_grouped_wgrad_all<float, false>(const GroupedWgradArgs&, int, Stream);
template Status launch_grouped_wgrad_all<float, true>(const GroupedWgradArgs&, int, Stream);

}  // namespace dropless::cuda
