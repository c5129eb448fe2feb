// Epilogue of expert_down_backward: from dA' = dy * down^T (in the accumulators), h and the routing
// weight p,
//   dh_gate = p dA' act'(h_gate) h_up,  dh_up = p dA' act(h_gate),  pA = p act(h_gate) h_up
// (for gated SiLU; without a gate there is no h_up: tile/glu.cuh),
// and the sum of dA' * A over this tile's columns, the tile's share of p's gradient.
//
// The work goes in steps of 64 rows x 32 columns. The copy engine brings h in boxes of that size,
// the first ones while the tile is still being multiplied; ldmatrix reads them in the layout of the
// accumulators, stmatrix puts dh where h was, and the copy engine takes it away. So nothing is
// turned around, no address is computed for an element, and no load is waited for.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/tile/glu.cuh"
#include "cuda/tile/result.cuh"

namespace dropless::cuda {

// Shared memory of one warpgroup: three pairs of boxes for gate and up, two boxes for pA, a weight
// a row.
class DswigluStaging {
 public:
  using BoxType = Box<64>;
  static constexpr int kPairs = 3;
  static constexpr int kRows = 128;
  static constexpr int kPaOffset = kPairs * 2 * BoxType::kBytes;
  static constexpr int kWeightsOffset = kPaOffset + 2 * BoxType::kBytes;
  static constexpr int kBarrierOffset = kWeightsOffset + kRows * 4;
  static constexpr int kBytes = (kBarrierOffset + kPairs * 8 + 1023) / 1024 * 1024;

  __device__ DswigluStaging(uint8_t* buffers, int warpgroup)
      : buffers_(buffers),
        thread_(threadIdx.x % kWarpgroup),
        barrier_(kWarpgroupBarrier + warpgroup),
        fragment_(ptx::shared_address(buffers) + BoxType::fragment_offset(thread_)) {}

  __device__ static void init(uint8_t* buffers) {
    for (int i = 0; i < kPairs; ++i) ptx::mbarrier_init(full(buffers) + i, 1);
  }

  __device__ __forceinline__ int thread() const { return thread_; }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(barrier_, kWarpgroup); }
  // Box `matrix` (gate, up) of pair `pair`, and box `which` of pA.
  __device__ __forceinline__ uint8_t* h(int pair, int matrix) const {
    return buffers_ + (2 * pair + matrix) * BoxType::kBytes;
  }
  __device__ __forceinline__ uint8_t* pa(int which) const {
    return buffers_ + kPaOffset + which * BoxType::kBytes;
  }
  // Address of this lane's 16 bytes of columns 16 half .. in a box.
  __device__ __forceinline__ uint32_t fragment(const uint8_t* box, int half) const {
    return (fragment_ ^ (half * 32)) + static_cast<uint32_t>(box - buffers_);
  }

  // One thread: gate, and up if there are two parts.
  template <int kParts>
  __device__ __forceinline__ void load(const CUtensorMap* map, int pair, int col, int row) const {
    uint64_t* barrier = full(buffers_) + pair;
    ptx::mbarrier_arrive_expect_tx(barrier, kParts * BoxType::kBytes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::tma_load(h(pair, part), map, barrier, col, row, part);
    }
  }
  __device__ __forceinline__ void await(int pair) {
    ptx::mbarrier_wait(full(buffers_) + pair, phases_ >> pair & 1);
    phases_ ^= 1u << pair;
  }

  __device__ __forceinline__ void set_weight(int row, float weight) const {
    reinterpret_cast<float*>(buffers_ + kWeightsOffset)[row] = weight;
  }
  __device__ __forceinline__ float weight(int row) const {
    return reinterpret_cast<const float*>(buffers_ + kWeightsOffset)[row];
  }

  __device__ __forceinline__ void finish() const {
    if (thread_ == 0) ptx::tma_store_wait_read<0>();
  }

 private:
  __device__ static __forceinline__ uint64_t* full(uint8_t* buffers) {
    return reinterpret_cast<uint64_t*>(buffers + kBarrierOffset);
  }

  uint8_t* buffers_;
  int thread_;
  int barrier_;
  uint32_t fragment_;
  uint32_t phases_ = 0;
};

template <GluForm kForm>
class DswigluEpilogue {
 public:
  static constexpr int kMatrices = 1;
  template <class Tile>
  static constexpr bool kStepped = false;
  template <class Tile>
  using Staging = DswigluStaging;
  struct Params {
    CUtensorMap h;               // planes gate, up of [M, I]
    ResultMatrix dh;             // as h
    ResultMatrix pa;             // [M, I]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int rows;                    // M
    ActivationOptions activation;
  };

  __device__ explicit DswigluEpilogue(const Params& params) : params_(params) {}

  // Before the tile is multiplied: its rows' weights, and its first boxes of h.
  template <int kRows, int kCols>
  __device__ __forceinline__ void prepare(const RowTile& tile, int row, int rows,
                                          DswigluStaging& staging) const {
    const int thread = staging.thread();
    staging.sync();  // the last tile's rows have been copied out of their boxes
    if (thread < kRows) {
      const int slot = thread < rows ? __ldg(params_.slot_of_row + row + thread) : -1;
      staging.set_weight(thread, slot >= 0 ? __ldg(params_.weights + slot) : 0.0f);
    }
    if (thread == 0) {
      ptx::tma_store_wait_read<0>();
#pragma unroll
      for (int step = 0; step < DswigluStaging::kPairs; ++step) {
        load_step<kCols>(step, tile, row, rows, staging);
      }
    }
  }

  template <int kRowTiles, int kAll>
  __device__ __forceinline__ void store(float (&acc)[kRowTiles][kAll], const RowTile& tile, int row,
                                        int rows, DswigluStaging& staging) const {
    constexpr int kCols = 2 * kAll, kSteps = kCols / kBoxCols;  // of a block of 64 rows
    const int lane = staging.thread() % 32;
    const int lane_row = staging.thread() / 32 * 16 + lane / 4;  // and 8 more
    staging.sync();                                              // the weights are there
#pragma unroll
    for (int block = 0; block < kRowTiles; ++block) {
      if (rows <= block * kChunk) continue;
      const int first = row + block * kChunk, present = min(rows - block * kChunk, kChunk);
      const float p[2] = {staging.weight(block * kChunk + lane_row),
                          staging.weight(block * kChunk + lane_row + 8)};
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int chunk = 0; chunk < kSteps; ++chunk) {
        const int step = block * kSteps + chunk, pair = step % DswigluStaging::kPairs;
        const int col = tile.col + chunk * kBoxCols;
        uint8_t* pa = staging.pa(step % 2);
        if (col < params_.pa.cols) {
          staging.await(pair);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            differentiate(&acc[block][chunk * 16 + half * 8], p, sum,
                          staging.fragment(staging.h(pair, 0), half),
                          staging.fragment(staging.h(pair, 1), half), staging.fragment(pa, half));
          }
          ptx::fence_proxy_async();
        }
        // What the last step stored has left its boxes: they are free after the barrier.
        if (staging.thread() == 0) ptx::tma_store_wait_read<0>();
        staging.sync();
        if (staging.thread() == 0 && step > 0) {
          load_step<kCols>(step + DswigluStaging::kPairs - 1, tile, row, rows, staging);
        }
        if (col < params_.pa.cols) send(staging, pair, pa, col, first, present);
      }
      store_sums(tile.col / kCols, first, present, lane_row, sum, lane);
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    const int64_t bytes = static_cast<int64_t>(params.pa.cols) * 2;
    zero_bytes(params.dh.data + row * params.dh.row_bytes, kParts * bytes, lane);
    zero_bytes(params.pa.data + row * params.pa.row_bytes, bytes, lane);
  }

 private:
  static constexpr int kParts = Glu<kForm>::kParts;
  static constexpr int kBoxCols = DswigluStaging::BoxType::kCols<__nv_bfloat16>;

  // One thread: asks for h of a step that exists.
  template <int kCols>
  __device__ __forceinline__ void load_step(int step, const RowTile& tile, int row, int rows,
                                            const DswigluStaging& staging) const {
    constexpr int kSteps = kCols / kBoxCols;
    const int block = step / kSteps, col = tile.col + step % kSteps * kBoxCols;
    if (block * kChunk < rows && col < params_.pa.cols) {
      staging.load<kParts>(&params_.h, step % DswigluStaging::kPairs, col, row + block * kChunk);
    }
  }

  // 16 columns of the warp's 16 rows: gate and up become dh in place.
  __device__ __forceinline__ void differentiate(const float* d, const float (&p)[2],
                                                float (&sum)[2], uint32_t gate, uint32_t up,
                                                uint32_t pa) const {
    uint32_t g[4], u[4] = {}, a[4];
    ptx::ldmatrix_x4(gate, g);
    if constexpr (kParts == 2) ptx::ldmatrix_x4(up, u);
    Glu<kForm>::with(params_.activation, [&](auto value) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i % 2;
        float dg[2], du[2], weighted[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float z = __uint_as_float(side == 0 ? g[i] << 16 : g[i] & 0xFFFF0000u);
          const float v = __uint_as_float(side == 0 ? u[i] << 16 : u[i] & 0xFFFF0000u);
          const GluValue a_of_h = value(z, v);
          const float product = d[2 * i + side], pd = p[row] * product;
          sum[row] += product * a_of_h.a;
          dg[side] = pd * a_of_h.d_gate;
          du[side] = pd * a_of_h.d_up;
          weighted[side] = p[row] * a_of_h.a;
        }
        g[i] = ptx::pack_bf16(dg[0], dg[1]);
        u[i] = ptx::pack_bf16(du[0], du[1]);
        a[i] = ptx::pack_bf16(weighted[0], weighted[1]);
      }
    });
    ptx::stmatrix_x4(gate, g[0], g[1], g[2], g[3]);
    if constexpr (kParts == 2) ptx::stmatrix_x4(up, u[0], u[1], u[2], u[3]);
    ptx::stmatrix_x4(pa, a[0], a[1], a[2], a[3]);
  }

  // The step's boxes to rows first .. first + rows - 1.
  __device__ __forceinline__ void send(const DswigluStaging& staging, int pair, const uint8_t* pa,
                                       int col, int first, int rows) const {
    if (rows >= kChunk) {
      if (staging.thread() == 0) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          ptx::tma_store(&params_.dh.map, staging.h(pair, part), col, first, part);
        }
        ptx::tma_store(&params_.pa.map, pa, col, first, 0);
        ptx::tma_store_commit();
      }
    } else {
#pragma unroll 1
      for (int matrix = 0; matrix <= kParts; ++matrix) {
        const bool is_pa = matrix == kParts;
        DswigluStaging::BoxType::copy_rows<__nv_bfloat16>(
            ptx::shared_address(is_pa ? pa : staging.h(pair, matrix)),
            is_pa ? params_.pa : params_.dh, col, first, is_pa ? 0 : matrix, rows,
            staging.thread());
      }
    }
  }

  // A row's sum lies in 4 lanes.
  __device__ __forceinline__ void store_sums(int col_tile, int first, int rows, int lane_row,
                                             const float (&sum)[2], int lane) const {
    float* sums = params_.row_sums + static_cast<int64_t>(col_tile) * params_.rows + first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum[i];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (lane % 4 == 0 && lane_row + 8 * i < rows) sums[lane_row + 8 * i] = total;
    }
  }

  const Params& params_;
};

}  // namespace dropless::cuda
