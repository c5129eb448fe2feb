// grouped_gemm on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

using GroupedGemmSm90Tiles =
    std::tuple<GemmTile<128, 192, 4, 1, true>, GemmTile<128, 256, 4, 2, false>>;

// Which of them: the first one hides its stores, which are much of a short contraction's time; the
// second one reads least per product, which a long contraction lives on, and multiplies fewer rows
// past a group's end, which groups of few rows live on. docs/gpu_gemm.md has the measurements.
constexpr int grouped_gemm_sm90_tile(int64_t rows, int64_t experts, int64_t contraction,
                                     int64_t cols) {
  const int64_t long_contraction = rows <= 768 * experts ? 1536 : 3072;
  // Columns computed, of which some may not exist; a few percent more are worth it, not more.
  const int64_t narrow = ceil_div(cols, 192) * 192, wide = ceil_div(cols, 256) * 256;
  return contraction >= long_contraction && 100 * wide <= 103 * narrow ? 1 : 0;
}

// Args are checked, sizes are positive, operands are bfloat16.
Status launch_grouped_gemm_sm90(const GroupedGemmArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
