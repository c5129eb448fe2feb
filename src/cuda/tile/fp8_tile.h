// Tile shapes of the FP8 products on sm_90a. Host and device code.
#pragma once

#include "cuda/tile/gemm_tile.h"
#include "dropless/types.h"

namespace dropless::cuda {

// Contraction elements of a stage.
inline constexpr int kFp8Block = static_cast<int>(kScaleBlock);
static_assert(kFp8Block == 2 * kChunk);  // chunks keep their bytes: 64 rows of 128

// A tile and how its products reach their fp32 accumulators: in chunks of 64 x kChunkCols through
// kScratches scratch accumulators. Two scratches let a warpgroup add up one chunk while its next
// one is being multiplied, one leaves that to the other warpgroup. Accumulators and scratches
// share a thread's registers: 64-row blocks of tile columns / 2, and kChunkCols / 2 a scratch.
template <class Tile, int chunk_cols, int scratches>
struct Fp8Tile : Tile {
  static constexpr int kChunkCols = chunk_cols;
  static constexpr int kScratches = scratches;
};

}  // namespace dropless::cuda
