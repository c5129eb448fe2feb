// The last step of the routing weights' gradient beside FP8 products: adds up the column tiles'
// shares and what the down-projection's bias adds, and scatters the sums to slots.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/tile/warp.cuh"
#include "dropless/types.h"

namespace dropless::cuda {

struct WeightGradientFp8Params {
  const float* row_sums;       // [tiles, M]
  const __nv_fp8_e4m3* dy;     // [M, H]
  const float* dy_scale;       // [M, ceil(H/128)]
  const float* bias;           // [E, H] or null
  const int32_t* slot_of_row;  // [M]
  const int32_t* offsets;      // [E+1]
  float* d_weights;            // [T, K]
  int experts, tiles, rows, width, slots;
};

// d_weights[slot_of_row[r]] = sum over tiles of row_sums[tile, r] + dot(dy[r], bias[e(r)]). A warp
// a row; the order of the sum does not depend on which block ran when.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) weight_gradient_fp8_kernel(WeightGradientFp8Params p) {
  const int row = (blockIdx.x * kThreads + threadIdx.x) / kWarpSize, lane = lane_id();
  if (row >= p.rows || row < p.offsets[0] || row >= p.offsets[p.experts]) return;
  const int slot = p.slot_of_row[row];
  if (slot < 0 || slot >= p.slots) return;
  float sum = 0.0f;
  for (int tile = lane; tile < p.tiles; tile += kWarpSize) {
    sum += p.row_sums[static_cast<int64_t>(tile) * p.rows + row];
  }
  if (p.bias != nullptr) {
    int low = 0, high = p.experts;  // the last expert whose first row is not past `row`
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.offsets[middle] <= row ? low : high) = middle;
    }
    constexpr int kBlock = static_cast<int>(kScaleBlock);
    const __nv_fp8_e4m3* dy = p.dy + static_cast<int64_t>(row) * p.width;
    const float* scale = p.dy_scale + static_cast<int64_t>(row) * ceil_div(p.width, kBlock);
    const float* bias = p.bias + static_cast<int64_t>(low) * p.width;
    for (int i = lane; i < p.width; i += kWarpSize) {
      sum += static_cast<float>(dy[i]) * scale[i / kBlock] * bias[i];
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) p.d_weights[slot] = sum;
}

}  // namespace dropless::cuda
