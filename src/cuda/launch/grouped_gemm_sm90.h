// grouped_gemm on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using GroupedGemmSm90Tiles =
    std::tuple<GemmTile<128, 256, 4, 1, false>, GemmTile<128, 256, 4, 2, false>, GemmTile<128, 192, 4, 1, true>>;

// Args are checked, sizes are positive, operands are bfloat16.
Status launch_grouped_gemm_sm90(const GroupedGemmArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
