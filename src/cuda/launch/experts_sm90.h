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

// Its epilogue is half of the time and needs registers: a narrower tile than the plain product's
// leaves them.
using ExpertDownBackwardSm90Tile = GemmTile<128, kDownBackwardTileCols, 5, 1, true>;

// row_sums [ceil(I / kDownBackwardTileCols), M] is scratch.
Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, float* row_sums,
                                        Stream stream);

// Tiles are GroupedGemmSm90Tiles.
Status launch_expert_up_backward_sm90(const ExpertUpBackwardArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
