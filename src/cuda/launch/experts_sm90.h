// The experts' fused products on sm_90a: the tile shapes that are compiled, and a launch of one of
// them. Rows in token order are gathered while they are loaded.
#pragma once

#include "core/product_workspace.h"
#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using ExpertUpSm90Tile = GemmTile<128, 256, 4, 2, false>;

// Args are checked, sizes are positive, operands are bfloat16.
Status launch_expert_up_sm90(const ExpertUpArgs& args, Stream stream);

using ExpertDownBackwardSm90Tiles =
    std::tuple<GemmTile<128, 192, 4, 1, true>, GemmTile<128, kDownBackwardTileCols, 5, 1, true>,
               GemmTile<128, 192, 4, 2, true>>;

// Which of them: the wide ones read less per product, and are slower only where the narrow one
// wastes fewer columns. With few rows an expert, blocks do not find each other's weights in L2 any
// more, and pairs of blocks that share them are faster. docs/gpu_gemm.md has the measurements.
constexpr int expert_down_backward_sm90_tile(int64_t rows, int64_t experts, int64_t width) {
  const int64_t narrow = ceil_div(width, 128) * 128, wide = ceil_div(width, 192) * 192;
  if (100 * wide > 108 * narrow) return 1;
  return rows <= 1536 * experts ? 2 : 0;
}
constexpr int64_t expert_down_backward_sm90_cols(int tile) {
  return tile == 1 ? kDownBackwardTileCols : 192;
}

// row_sums [ceil(I / kDownBackwardTileCols), M] is scratch.
Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, int tile,
                                        float* row_sums, Stream stream);

// Tiles are GroupedGemmSm90Tiles.
Status launch_expert_up_backward_sm90(const ExpertUpBackwardArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
