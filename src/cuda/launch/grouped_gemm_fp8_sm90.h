// grouped_gemm in FP8 on sm_90a: the tile shapes that are compiled, and a launch of one of them.
#pragma once

#include "cuda/tile/fp8_tile.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

// For results in bfloat16, and for those in float32, which take twice the shared memory.
using GroupedGemmFp8Sm90Tiles = std::tuple<Fp8Tile<192, 4, 1, 192>>;
using GroupedGemmFp8Sm90F32Tiles = std::tuple<Fp8Tile<192, 3, 1, 192>>;

// Which of them.
constexpr int grouped_gemm_fp8_sm90_tile(int64_t, int64_t) { return 0; }

// Args are checked, sizes are positive, operands are float8, rhs is [E, N, Kc].
Status launch_grouped_gemm_fp8_sm90(const GroupedGemmArgs& args, int tile, Stream stream);

}  // namespace dropless::cuda
