// Tile shapes of the FP8 products on sm_90a. Host and device code.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/types.h"

namespace dropless::cuda {

// Contraction elements of a stage.
inline constexpr int kFp8Block = static_cast<int>(kScaleBlock);
static_assert(kFp8Block == 2 * kChunk);  // chunks keep their bytes: 64 rows of 128

// A tile of 128 rows, of which two warpgroups multiply 64 each. Products reach their fp32
// accumulators (columns / 2 registers of a thread) through a scratch accumulator of chunk_cols
// columns (chunk_cols / 2 registers).
template <int cols, int stages, int cluster, int chunk_cols>
struct Fp8Tile : GemmTile<2 * kChunk, cols, stages, cluster, false> {
  static constexpr int kChunkCols = chunk_cols;
};

}  // namespace dropless::cuda
