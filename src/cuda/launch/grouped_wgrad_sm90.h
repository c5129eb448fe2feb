// grouped_wgrad on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using GroupedWgradSm90Tiles =
    std::tuple<GemmTile<128, 192, 4, 1, true>, GemmTile<128, 256, 4, 2, false>>;

// Which of them: the first one hides its stores, which are much of a short contraction's time, and
// is as fast as the second one, which reads least, from about 1536 rows an expert on. There it
// only takes a few columns wasted for the second one to be faster.
constexpr int grouped_wgrad_sm90_tile(int64_t rows, int64_t experts, int64_t cols) {
  const int64_t narrow = ceil_div(cols, 192) * 192, wide = ceil_div(cols, 256) * 256;
  return 100 * narrow > (rows > 1536 * experts ? 102 : 110) * wide ? 1 : 0;
}

// The one that gathers while it loads: in turns, a warpgroup alone feeds the tensor cores, and late
// rows cost 10 to 30 %.
using GatheringWgradSm90Tile = GemmTile<128, 256, 4, 1, false>;

// Whether gathering while loading beats multiplying a copy in row order. Tiles along the other
// operand load the same rows again, each time a little slower than in order, and the copy is made
// once: slower from 2880 columns of the other operand on. Up to 2048 x is gathered, which saves a
// launch and loses 0 to 4 % of the product; so is dy, but in groups of few rows only up to 1024,
// for there the copy's product, in turns, is faster by 12 %.
constexpr bool grouped_wgrad_sm90_gathers(bool left, int64_t rows, int64_t experts,
                                          int64_t other_cols) {
  return other_cols <= (!left && rows <= 768 * experts ? 1024 : 2048);
}

// Args are checked, sizes are positive, operands are bfloat16. Where rows are gathered, `tile` is
// not looked at.
Status launch_grouped_wgrad_sm90(const GroupedWgradArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
