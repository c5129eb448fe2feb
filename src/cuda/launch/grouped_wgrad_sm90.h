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

// Args are checked, sizes are positive, operands are bfloat16 and contiguous (no gather).
Status launch_grouped_wgrad_sm90(const GroupedWgradArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
