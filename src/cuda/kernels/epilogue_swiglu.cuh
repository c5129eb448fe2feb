// Epilogue of expert_up: h = (gate, up) + biases rounded to bf16, and A from the rounded h; experts
// without a gate have one matrix, and A = act(h).
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/tile/glu.cuh"

namespace dropless::cuda {

// A gated tile holds columns c of gate in its left half and the same columns of up in its right
// half, so each thread has both in registers.
template <GluForm kForm>
class SwigluEpilogue {
 public:
  static constexpr int kMatrices = Glu<kForm>::kParts;
  template <class Tile>
  using Staging = ResultStagingOf<Tile>;
  struct Params {
    ResultMatrix h;          // planes gate, up of [M, I]; data is null if h is not wanted
    ResultMatrix a;          // [M, I]
    const float* gate_bias;  // [E, I] or null
    const float* up_bias;    // [E, I] or null; gated only
    ActivationOptions activation;
  };

  __device__ explicit SwigluEpilogue(const Params& params) : params_(params) {}

  template <int kRows, int kCols, class Staging>
  __device__ __forceinline__ void prepare(const RowTile&, int, int, Staging&) const {}

  // Results of a block of 64 rows: taken out of the accumulators, and stored in steps, each a box
  // of gate, of up, or of A. Other activations' steps are too long a code to stand between
  // products.
  static constexpr bool kDeferred = kForm == GluForm::kSilu || kForm == GluForm::kSiluLimited;
  template <class Tile>
  static constexpr bool kStepped = true;
  template <class Tile>
  using Pending = PendingBlock<Tile::kCols / 4>;
  template <class Tile>
  static constexpr int kSteps = Tile::kCols / kMatrices / kChunk*(kMatrices + 1);

  template <int kAll>
  __device__ __forceinline__ void collect(float (&acc)[kAll], const RowTile& tile, int row,
                                          int rows, PendingBlock<kAll / 2>& pending,
                                          int thread) const {
    constexpr int kRegisters = kAll / kMatrices;  // of one matrix; those of up come second
    const int lane_col = thread % 4 * 2;
    if (params_.gate_bias != nullptr) {
      add_bias<0, kRegisters>(acc, params_.gate_bias, tile, lane_col);
    }
    if (kMatrices == 2 && params_.up_bias != nullptr) {
      add_bias<kAll - kRegisters, kRegisters>(acc, params_.up_bias, tile, lane_col);
    }
    pending.collect(acc, tile, row, rows);
  }

  template <class Index, int kPairs, class Staging>
  __device__ __forceinline__ void step(Index index, const PendingBlock<kPairs>& pending,
                                       Staging& staging) const {
    if (pending.rows == 0) return;
    constexpr int kChunkIndex = Index::value / (kMatrices + 1);
    constexpr int kPlane = Index::value % (kMatrices + 1);  // or A, the last
    constexpr int kGate = kChunkIndex * 16, kUp = kPairs - kPairs / kMatrices + kGate;
    const int col = pending.col + kChunkIndex * kChunk;
    if constexpr (kPlane < kMatrices) {
      if (params_.h.data == nullptr) return;
      staging.write_pairs([&](int i) { return pending.pairs[(kPlane == 0 ? kGate : kUp) + i]; });
      staging.template send<__nv_bfloat16>(params_.h, col, pending.row, kPlane, pending.rows);
    } else {
      Glu<kForm>::with(params_.activation, [&](auto value) {
        staging.write_pairs([&](int i) {
          const uint32_t g = pending.pairs[kGate + i], u = pending.pairs[kUp + i];
          return ptx::pack_bf16(value(ptx::low_bf16(g), ptx::low_bf16(u)).a,
                                value(ptx::high_bf16(g), ptx::high_bf16(u)).a);
        });
      });
      staging.template send<__nv_bfloat16>(params_.a, col, pending.row, 0, pending.rows);
    }
  }

  __device__ static void zero_row(const Params& params, int row, int lane) {
    const int64_t bytes = static_cast<int64_t>(params.a.cols) * 2;
    zero_bytes(params.a.data + row * params.a.row_bytes, bytes, lane);
    if (params.h.data != nullptr)
      zero_bytes(params.h.data + row * params.h.row_bytes, kMatrices * bytes, lane);
  }

 private:
  // To kCount registers from kFirst on.
  template <int kFirst, int kCount, int kAll>
  __device__ __forceinline__ void add_bias(float (&acc)[kAll], const float* bias,
                                           const RowTile& tile, int lane_col) const {
    bias += static_cast<int64_t>(tile.expert) * params_.a.cols;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int col = tile.col + j * 8 + lane_col;
      if (col >= params_.a.cols) continue;
      const float2 b = __ldg(reinterpret_cast<const float2*>(bias + col));
      acc[kFirst + 4 * j] += b.x;
      acc[kFirst + 4 * j + 1] += b.y;
      acc[kFirst + 4 * j + 2] += b.x;
      acc[kFirst + 4 * j + 3] += b.y;
    }
  }

  const Params& params_;
};

}  // namespace dropless::cuda
