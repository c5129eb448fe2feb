// grouped_wgrad on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using GroupedWgradSm90Tiles =
    std::tuple<GemmTile<128, 192, 4, 1, true>, GemmTile<128, 256, 4, 1, false>>;

// Which of them: the first measured faster or as fast on every shape whose columns it wastes no
// more of.
constexpr int grouped_wgrad_sm90_tile(int64_t cols) {
  const int64_t narrow = ceil_div(cols, 192) * 192, wide = ceil_div(cols, 256) * 256;
  return 100 * narrow > 110 * wide ? 1 : 0;
}

// The one that also gathers while it loads: in the other one a warpgroup alone feeds the tensor
// cores, and late rows cost 10 to 30 %.
inline constexpr int kGatheringWgradTile = 1;

// Whether gathering while loading beats multiplying a copy in row order. Tiles along the other
// operand load the same rows again, each time a little slower than in order, and the copy is made
// once: measured faster up to 2048 columns of the other operand, slower from 2880 on.
constexpr bool grouped_wgrad_sm90_gathers(int64_t other_cols) { return other_cols <= 2048; }

// Args are checked, sizes are positive, operands are bfloat16. Where rows are gathered the tile is
// kGatheringWgradTile.
Status launch_grouped_wgrad_sm90(const GroupedWgradArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
