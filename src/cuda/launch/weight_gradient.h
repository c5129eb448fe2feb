// The routing weights' gradient, after the product that leaves its row sums.
#pragma once

#include "cuda/tile/row_map.cuh"
#include "dropless/cuda.h"

namespace dropless::cuda {

// args.d_weights from row_sums [tiles, M]. dy [T or M, H] is float32 or bfloat16; `map` gives the
// row of it that belongs to a row.
Status launch_weight_gradient(const ExpertDownBackwardArgs& args, ConstTensor dy, const RowMap& map,
                              const float* row_sums, int tiles, Stream stream);

}  // namespace dropless::cuda
