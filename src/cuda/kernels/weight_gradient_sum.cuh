// The last step of the routing weights' gradient: adds up the column tiles' shares and scatters
// them to slots.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/tile/element.cuh"
#include "cuda/tile/row_map.cuh"

namespace dropless::cuda {

// d_weights[slot_of_row[r]] = sum over tiles of row_sums[tile, r], for the rows of all groups, and
// 0 for slots without a row. Tiles are added in order, so the result does not depend on which block
// ran when. A cooperative launch: all blocks wait for the zeros.
__global__ void __launch_bounds__(256)
    weight_gradient_sum_kernel(const float* row_sums /* [tiles, M] */, const int32_t* slot_of_row,
                               const int32_t* offsets /* [E+1] */, int experts, int tiles, int rows,
                               int slots, float* d_weights /* [T, K] */) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  const int step = gridDim.x * blockDim.x;
  const int begin = offsets[0], end = min(offsets[experts], rows);
  if (end - begin != slots) {  // else every slot has a row
    for (int64_t slot = first; slot < slots; slot += step) d_weights[slot] = 0.0f;
    cooperative_groups::this_grid().sync();
  }
  for (int64_t row = first; row < end; row += step) {  // past 2^31 at the end
    if (row < begin) continue;
    const int slot = slot_of_row[row];
    if (slot < 0 || slot >= slots) continue;
    float sum = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
      sum += row_sums[static_cast<int64_t>(tile) * rows + row];
    }
    d_weights[slot] = sum;
  }
}

// d_weights[slot_of_row[r]] += dot(dy[map.row(r)], bias[e(r)]): what a bias of the down-projection
// adds. A warp a row.
template <class T>
__global__ void __launch_bounds__(256)
    weight_gradient_bias_kernel(const T* dy /* [T or M, H] */, RowMap map,
                                const float* bias /* [E, H] */, const int32_t* slot_of_row,
                                const int32_t* offsets, int experts, int rows, int slots, int width,
                                float* d_weights) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows || row < offsets[0] || row >= offsets[experts]) return;
  const int slot = slot_of_row[row];
  const int64_t from = map.row(row);
  if (slot < 0 || slot >= slots || from < 0) return;
  int low = 0,
      high = experts;  // the last expert whose first row is not past `row`, empty ones skipped
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  float sum = 0.0f;
  for (int i = lane; i < width; i += 32) {
    sum += to_float(dy[from * width + i]) * bias[static_cast<int64_t>(low) * width + i];
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) d_weights[slot] += sum;
}

}  // namespace dropless::cuda
