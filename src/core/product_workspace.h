// Sizes of the products' workspaces that host code and kernels share.
#pragma once

#include <cstdint>

namespace dropless::cuda {

// Columns of the narrowest tile of expert_down_backward: each tile leaves a partial sum a row.
inline constexpr int64_t kDownBackwardTileCols = 128;

}  // namespace dropless::cuda
