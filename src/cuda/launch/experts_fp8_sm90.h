// The experts' fused FP8 products on sm_90a. Their row operands are already in expert order.
#pragma once

#include "dropless/cuda.h"

namespace dropless::cuda {

// Args are checked, sizes are positive, operands are float8, weights have the contraction last.

// `rows` [M, H] and `row_scale` [M, ceil(H/128)] take the place of args.x and args.x_scale.
Status launch_expert_up_fp8_sm90(const ExpertUpArgs& args, ConstTensor rows, ConstTensor row_scale,
                                 Stream stream);

// They take the place of args.dy and args.dy_scale; h is bfloat16. row_sums [ceil(I/128), M] is
// scratch.
Status launch_expert_down_backward_fp8_sm90(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                            ConstTensor row_scale, float* row_sums, Stream stream);

// Tiles are GroupedGemmFp8Sm90Tiles.
Status launch_expert_up_backward_fp8_sm90(const ExpertUpBackwardArgs& args, int tile,
                                          Stream stream);

}  // namespace dropless::cuda
