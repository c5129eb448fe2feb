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

template <class Math, bool kAligned>
class GroupedWgradSm80 {
 public:
  using Element = typename Math::Element;
  static constexpr int kThreads = Math::kThreads;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  using Scheduler = WeightTileScheduler<GemmTile<Math::kRows, Math::kCols, kMostStages, 1, false>>;

  __device__ GroupedWgradSm80(const WgradParams& params, uint8_t* smem)
      : params_(params),
        smem_(ptx::shared_address(smem)),
        staged_(Math::kStartsEarly ? smem_ + (params.stages - 1) * Math::kStageBytes : smem_),
        tables_(smem_ + params.stages * Math::kStageBytes) {}

  __device__ void run() const {
    const Scheduler tiles(params_.offsets, params_.experts, params_.contraction, params_.rows,
                          params_.cols, params_.planes, 0);
    int item = blockIdx.x;
    WeightTile tile, next;
    if (!find(tiles, item, tile)) return;
    start(tile, look_up_first(tile));
    while (true) {
      item += gridDim.x;
      const bool more = find(tiles, item, next);
      const FirstRows first = more ? look_up_first(next) : FirstRows();
      Math math;
      math.clear();
      Source source(*this, tile, params_.stages - 1);
      multiply_stages(math, smem_, params_.stages, steps(tile), source);
      __syncthreads();
      if (Math::kStartsEarly && more) start(next, first);
      if (params_.out_f32) {
        finish<float>(math, tile);
      } else {
        finish<__nv_bfloat16>(math, tile);
      }
      if (!more) return;
      if (!Math::kStartsEarly) {
        __syncthreads();
        start(next, first);
      }
      tile = next;
    }
  }

 private:
  using LhsCopy = StageCopy<Element, Major::kMn, Math::kRows, kThreads>;
  using RhsCopy = StageCopy<Element, Major::kMn, Math::kCols, kThreads>;
  static_assert(Math::kLhs == Major::kMn && Math::kRhs == Major::kMn);
  static_assert(2 * Math::kDepth <= 128 && 2 * Math::kDepth <= kThreads);

  // The item's tile, or that of the first one after it which has something to do.
  __device__ __forceinline__ bool find(const Scheduler& tiles, int& item, WeightTile& tile) const {
    for (;; item += gridDim.x) {
      if (!tiles.find(item, tile)) return false;
      if (tile.depth > 0 || !params_.accumulate) return true;
    }
  }

  __device__ __forceinline__ static int steps(const WeightTile& tile) {
    return (tile.depth + Math::kDepth - 1) / Math::kDepth;
  }

  // The rows of x and dy at a stage's contraction steps stand in a ring of tables in shared memory.
  // One thread looks up one entry: its load is issued two steps, and its store one step, before the
  // copies that need it, with a barrier between; those of a tile's first steps before the tile that
  // precedes it is multiplied.
  static constexpr int kTables = 4;
  static_assert(kTables >= kMostStages && (kTables & (kTables - 1)) == 0);
  __device__ __forceinline__ uint32_t table(int step) const {
    return tables_ + (step & (kTables - 1)) * (128 * 4);
  }
  struct FirstRows {
    int found[kTables];
  };
  __device__ __forceinline__ FirstRows look_up_first(const WeightTile& tile) const {
    FirstRows first;
#pragma unroll
    for (int step = 0; step < kTables; ++step) first.found[step] = look_up(tile, step);
    return first;
  }
  __device__ __forceinline__ bool looks_up() const { return threadIdx.x < 2 * Math::kDepth; }
  __device__ __forceinline__ const RowMap& own_map() const {
    return threadIdx.x < Math::kDepth ? params_.x_map : params_.dy_map;
  }
  __device__ __forceinline__ int look_up(const WeightTile& tile, int step) const {
    const int r = step * Math::kDepth + static_cast<int>(threadIdx.x) % Math::kDepth;
    return looks_up() && r < tile.depth ? own_map().look_up(tile.first + r) : -1;
  }
  __device__ __forceinline__ void write_row(int step, int found) const {
    if (!looks_up()) return;
    const int r = static_cast<int>(threadIdx.x) % Math::kDepth;
    const int place =
        threadIdx.x < Math::kDepth ? LhsCopy::place(r) : Math::kDepth + RhsCopy::place(r);
    ptx::store_shared_4(table(step) + place * 4, found < 0 ? -1 : own_map().resolve(found));
  }

  __device__ __forceinline__ void start(const WeightTile& tile, const FirstRows& first) const {
#pragma unroll
    for (int step = 0; step < kTables; ++step) write_row(step, first.found[step]);
    __syncthreads();
    Source source(*this, tile, 0);
    start_stages<Math>(smem_, params_.stages, steps(tile), source);
  }

  // Copies the stages of one tile.
  class Source {
   public:
    __device__ __forceinline__ Source(const GroupedWgradSm80& kernel, const WeightTile& tile,
                                      int step)
        : kernel_(kernel),
          p_(kernel.params_),
          tile_(tile),
          step_(step),
          x_(opaque(p_.x + (tile.row + (kAligned ? lhs_.element() : 0)) * int64_t{kSize})),
          dy_(opaque(p_.dy + tile.plane * p_.dy_plane_bytes +
                     (tile.col + (kAligned ? rhs_.element() : 0)) * int64_t{kSize})),
          found_(step > 0 ? kernel.look_up(tile, step + 1) : -1) {}

    __device__ __forceinline__ void operator()(uint32_t stage, int part) {
      const uint32_t table = kernel_.table(step_);
      if (part == 0) {
        copy(lhs_, stage, x_, p_.x_row_bytes, table, p_.rows - tile_.row);
      } else if (part == 1) {
        copy(rhs_, stage + Math::kLhsBytes, dy_, p_.dy_row_bytes, table + Math::kDepth * 4,
             p_.cols - tile_.col);
      } else {
        if (step_ >= p_.stages - 1) {  // the first tables are there
          kernel_.write_row(step_ + 1, found_);
          found_ = kernel_.look_up(tile_, step_ + 2);
        }
        ++step_;
      }
    }

   private:
    template <class Copy>
    __device__ __forceinline__ void copy(const Copy& copy, uint32_t to, const uint8_t* from,
                                         uint32_t row_bytes, uint32_t table, int count) const {
      int rows[Copy::kCount];
      copy.rows(table, rows);
      if (kAligned) {
        copy.copy_rows(to, from, row_bytes, rows, count > copy.element());
      } else {
        copy.copy(to, {from, from}, row_bytes, rows, count - copy.element(), p_.access);
      }
    }

    const GroupedWgradSm80& kernel_;
    const WgradParams& p_;
    const WeightTile& tile_;
    const LhsCopy lhs_;
    const RhsCopy rhs_;
    int step_;  // the next one
    const uint8_t* const x_;
    const uint8_t* const dy_;
    int found_;
  };

  // The rows of one tile, on their way to the weight's gradient.
  template <class Out>
  class Sink {
   public:
    static constexpr bool kSums = false;

    __device__ Sink(const WgradParams& p, const WeightTile& tile, int col)
        : rows_(min(Math::kRows, p.rows - tile.row)),
          count_(p.cols - tile.col - col),
          row_bytes_(p.dw[tile.plane].row_bytes),
          vector_(kAligned || p.vector),
          accumulate_(p.accumulate),
          out_(p.dw[tile.plane].data + tile.expert * p.dw[tile.plane].plane_bytes +
               int64_t{tile.row} * row_bytes_ +
               static_cast<int64_t>(tile.col + col) * sizeof(Out)) {}

    __device__ __forceinline__ void load(int i, int r) {
      if (!accumulate_) return;
      load_8<Out, false>(out_ + r * row_bytes_, r < rows_ ? count_ : 0, vector_, old_[i]);
    }
    __device__ __forceinline__ float store(int i, int r, float (&value)[1][8]) const {
      if (r >= rows_ || count_ <= 0) return 0.0f;
      if (accumulate_) {
#pragma unroll
        for (int j = 0; j < 8; ++j) value[0][j] += old_[i][j];
      }
      store_8<Out>(out_ + r * row_bytes_, count_, vector_, value[0]);
      return 0.0f;
    }

   private:
    const int rows_, count_;
    const int64_t row_bytes_;
    const bool vector_, accumulate_;
    uint8_t* const out_;
    float old_[4][8];
  };

  template <class Out>
  __device__ __forceinline__ void finish(const Math& math, const WeightTile& tile) const {
    Sink<Out> sink(params_, tile, Math::lane_col());
    math.hand_out(staged_, 0, sink);
  }

  const WgradParams& params_;
  const uint32_t smem_;
  const uint32_t staged_;  // where tiles' rows are handed out
  const uint32_t tables_;  // [kTables][128]
};

template <class Math, bool kAligned>
__global__ void __launch_bounds__(Math::kThreads, 1)
    grouped_wgrad_sm80_kernel(const __grid_constant__ WgradParams params) {
  extern __shared__ __align__(128) uint8_t smem[];
  GroupedWgradSm80<Math, kAligned>(params, smem).run();
}

}  // namespace dropless::cuda
