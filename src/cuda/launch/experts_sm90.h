// The experts' fused products on sm_90a: the tile shapes that are compiled, and a launch of one of
// them. Their row operands are already in expert order.
#pragma once

#include "core/product_workspace.h"
#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using ExpertUpSm90Tile = GemmTile<128, 256, 4, 2, false>;

// `rows` [M, H] takes the place of args.x. Args are checked, sizes are positive, operands are
// bfloat16.
Status launch_expert_up_sm90(const ExpertUpArgs& args, ConstTensor rows, Stream stream);

// Its epilogue is half of the time and needs registers: a narrower tile than the plain product's
// leaves them.
using ExpertDownBackwardSm90Tile = GemmTile<128, kDownBackwardTileCols, 5, 1, true>;

// `rows` [M, H] takes the place of args.dy. row_sums [ceil(I / kDownBackwardTileCols), M] is
// scratch.
Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                        float* row_sums, Stream stream);

// Tiles are GroupedGemmSm90Tiles.
Status launch_expert_up_backward_sm90(const ExpertUpBackwardArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
