// grouped_wgrad in FP8 on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include <tuple>

#include "core/token_blocks.h"
#include "cuda/tile/gemm_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

// What grouped_wgrad multiplies, in its workspace.
struct WgradFp8Scratch {
  const uint8_t* x = nullptr;  // codes of x
  const float* x_scale = nullptr;
  const uint8_t* dy = nullptr;  // codes of dy
  const float* dy_scale = nullptr;
};

// A tile of two warpgroups, which take its blocks of 64 rows in turn.
template <int rows,          // BLK_M: a multiple of 128
          int cols,          // BLK_N
          int product_cols,  // of one wgmma: what is multiplied before it is scaled
          int stages>
struct Fp8WgradTile {
  static constexpr int kRows = rows;
  static constexpr int kCols = cols;
  static constexpr int kProductCols = product_cols;
  static constexpr int kStages = stages;
  static constexpr int kProducts = cols / product_cols;
  static constexpr int kCluster = 1;
  static constexpr bool kPingpong = false;
  static constexpr int kRowTiles = rows / 128;  // of a warpgroup
  static constexpr int kDepth = static_cast<int>(kScaleBlock);
  static constexpr int kCodeBytes = (rows + cols) * kDepth;
  static constexpr int kScaleBytes = (rows + cols) * static_cast<int>(sizeof(float));
  static_assert(rows % 128 == 0 && cols % product_cols == 0);
};

using GroupedWgradFp8Sm90Tiles = std::tuple<Fp8WgradTile<128, 256, 128, 3>>;

// Args are checked and sizes are positive; the operands are those of `scratch`.
Status launch_grouped_wgrad_fp8_sm90(const GroupedWgradArgs& args, int64_t rows,
                                     const WgradFp8Scratch& scratch, int tile, Stream stream);

}  // namespace dropless::cuda
