// dw[p][e] (+)= sum over the rows r of expert e of outer(x[r], dy[r, p]), on every GPU since sm_80:
// bf16 on tensor cores (grouped_wgrad_sm80) or float32 by FFMA (grouped_wgrad_f32).
//
// A product whose contraction runs over a group's rows; blocks and stages are those of
// grouped_gemm_sm80.cuh. Rows of x or dy may be gathered.
#pragma once

#include <cstdint>

#include "cuda/kernels/grouped_gemm_sm80.cuh"

namespace dropless::cuda {

struct WgradParams {
  const uint8_t* x;        // [M or T, Kc]
  const uint8_t* dy;       // [M or T, P, N]
  RowArray dw[2];          // P of them: E planes of [Kc, N]
  const int32_t* offsets;  // [E+1]
  RowMap x_map, dy_map;
  int64_t dy_plane_bytes;
  uint32_t x_row_bytes;
  uint32_t dy_row_bytes;
  int experts;
  int contraction;  // M
  int rows;         // Kc
  int cols;         // N
  int planes;       // P
  int access;       // as in RowProductParams
  int stages;
  bool vector;   // results are stored 16 bytes at a time
  bool out_f32;  // float32, else bfloat16
  bool accumulate;
};

template <class Math>
class GroupedWgradSm80 {
 public:
  using Element = typename Math::Element;
  static constexpr int kThreads = Math::kThreads;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  using Scheduler = WeightTileScheduler<BlockTile>;

  __device__ GroupedWgradSm80(const WgradParams& params, uint8_t* smem)
      : params_(params),
        smem_(ptx::shared_address(smem)),
        rows_(reinterpret_cast<int*>(smem + params.stages * kStageBytes)) {}

  __device__ void run() const {
    const Scheduler tiles(params_.offsets, params_.experts, params_.contraction, params_.rows,
                          params_.cols, params_.planes, 0);
    WeightTile tile;
    for (int item = blockIdx.x; tiles.find(item, tile); item += gridDim.x) {
      if (tile.depth == 0 && params_.accumulate) continue;
      Math math;
      multiply(math, tile);
      const StagedTile staged(smem_);
      math.stage(staged);
      __syncthreads();
      if (params_.out_f32) {
        store<float>(staged, tile);
      } else {
        store<__nv_bfloat16>(staged, tile);
      }
      __syncthreads();
    }
  }

 private:
  using Copy = StageCopy<Element, Major::kMn, kThreads>;
  static_assert(Math::kLhs == Major::kMn && Math::kRhs == Major::kMn);

  static_assert(2 * Math::kDepth <= 128 && 2 * Math::kDepth <= kThreads);

  // The rows of x and dy at a stage's contraction steps stand in a ring of four tables in shared
  // memory. One thread looks up one entry: its load is issued two steps, and its store one step,
  // before the copies that need it, with a barrier between.
  __device__ __forceinline__ bool looks_up() const { return threadIdx.x < 2 * Math::kDepth; }
  __device__ __forceinline__ const RowMap& own_map() const {
    return threadIdx.x < Math::kDepth ? params_.x_map : params_.dy_map;
  }
  __device__ __forceinline__ int look_up(const WeightTile& tile, int step) const {
    const int r = step * Math::kDepth + static_cast<int>(threadIdx.x) % Math::kDepth;
    return looks_up() && r < tile.depth ? own_map().look_up(tile.first + r) : -1;
  }
  __device__ __forceinline__ void write_row(int step, int found) const {
    if (looks_up()) {
      rows_[step % 4 * 128 + threadIdx.x] = found < 0 ? -1 : own_map().resolve(found);
    }
  }

  __device__ __forceinline__ void multiply(Math& math, const WeightTile& tile) const {
    const Copy copy;
    const uint8_t* x = params_.x + int64_t{tile.row} * kSize;
    const uint8_t* dy =
        params_.dy + tile.plane * params_.dy_plane_bytes + int64_t{tile.col} * kSize;
    const int ahead = params_.stages - 1;
    for (int step = 0; step <= ahead; ++step) write_row(step, look_up(tile, step));
    int found = look_up(tile, ahead + 1);
    __syncthreads();
    math.clear();
    const int steps = (tile.depth + Math::kDepth - 1) / Math::kDepth;
    multiply_stages(math, smem_, params_.stages, steps, [&](int step, uint32_t stage) {
      const int* table = rows_ + step % 4 * 128;
      int rows[Copy::kCount];
#pragma unroll
      for (int i = 0; i < Copy::kCount; ++i) rows[i] = table[copy.row(i)];
      copy.copy(stage, {x, x}, params_.x_row_bytes, rows, params_.rows - tile.row - copy.element(),
                params_.access);
#pragma unroll
      for (int i = 0; i < Copy::kCount; ++i) rows[i] = table[Math::kDepth + copy.row(i)];
      copy.copy(stage + kStageOperandBytes, {dy, dy}, params_.dy_row_bytes, rows,
                params_.cols - tile.col - copy.element(), params_.access);
      if (step < ahead) return;  // the first tables are there
      write_row(step + 1, found);
      found = look_up(tile, step + 2);
    });
  }

  template <class Out>
  __device__ __forceinline__ void store(const StagedTile& staged, const WeightTile& tile) const {
    const RowArray& to = params_.dw[tile.plane];
    const int lane_col = threadIdx.x % 16 * 8, col = tile.col + lane_col;
    const int count = params_.cols - col, rows = min(kBlockRows, params_.rows - tile.row);
    if (count <= 0) return;
    uint8_t* out = to.data + tile.expert * to.plane_bytes + int64_t{tile.row} * to.row_bytes +
                   static_cast<int64_t>(col) * sizeof(Out);
    for (int r = threadIdx.x / 16; r < rows; r += kThreads / 16) {
      float value[8];
      staged.load(r, lane_col, value);
      uint8_t* row = out + r * to.row_bytes;
      if (params_.accumulate) {
        float old[8];
        load_8<Out, false>(row, count, params_.vector, old);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] += old[i];
      }
      store_8<Out>(row, count, params_.vector, value);
    }
  }

  const WgradParams& params_;
  const uint32_t smem_;
  int* const rows_;  // [4][128]
};

template <class Math>
__global__ void __launch_bounds__(Math::kThreads, Math::kBlocks)
    grouped_wgrad_sm80_kernel(const __grid_constant__ WgradParams params) {
  extern __shared__ __align__(128) uint8_t smem[];
  GroupedWgradSm80<Math>(params, smem).run();
}

}  // namespace dropless::cuda
