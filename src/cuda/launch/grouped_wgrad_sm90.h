// grouped_wgrad on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using GroupedWgradSm90Tiles =
    std::tuple<GemmTile<128, 256, 4, 1, false>, GemmTile<128, 256, 4, 2, false>, GemmTile<128, 192, 4, 1, true>>;

// Args are checked, sizes are positive, operands are bfloat16 and contiguous (no gather).
Status launch_grouped_wgrad_sm90(const GroupedWgradArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
