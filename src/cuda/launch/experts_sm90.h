// The experts' fused products on sm_90a: the tile shapes that are compiled, and a launch of one of them. Their row
// operands are already in expert order.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using ExpertUpSm90Tiles =
    std::tuple<GemmTile<128, 256, 4, 1, false>, GemmTile<128, 256, 4, 2, false>>;

// `rows` [M, H] takes the place of args.x. Args are checked, sizes are positive, operands are bfloat16.
Status launch_expert_up_sm90(const ExpertUpArgs& args, ConstTensor rows, int tile, Stream stream);

using ExpertDownBackwardSm90Tiles =
    std::tuple<GemmTile<128, 192, 4, 1, true>>;
// Columns of every one of them: row_sums has a row a column tile.
inline constexpr int64_t kDownBackwardTileCols = 192;

// `rows` [M, H] takes the place of args.dy. row_sums [ceil(I / kDownBackwardTileCols), M] is scratch.
Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                        float* row_sums, int tile, Stream stream);

// Tiles are GroupedGemmSm90Tiles.
Status launch_expert_up_backward_sm90(const ExpertUpBackwardArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
