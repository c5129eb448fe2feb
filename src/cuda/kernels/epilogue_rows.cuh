// What follows a product on the kernels for every GPU since sm_80: sinks that a tile's rows are
// handed out to (mma_tile.cuh), 8 adjacent columns a lane. T is the type of the operands; kAligned:
// all arrays are multiples of 16 bytes; kPlainSilu: the activation is SiLU without options.
#pragma once

#include "cuda/tile/glu.cuh"
#include "cuda/tile/row_access.cuh"
#include "cuda/tile/tile_scheduler.cuh"

namespace dropless::cuda {

// The bias of 8 columns from `col` on, 0 where there is none.
__device__ __forceinline__ void load_bias(const float* bias, int expert, int cols, int col,
                                          float (&value)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool exists = bias != nullptr && col + i < cols;
    value[i] = exists ? __ldg(bias + static_cast<int64_t>(expert) * cols + col + i) : 0.0f;
  }
}

__device__ __forceinline__ float round_to(float, float x) { return x; }
__device__ __forceinline__ float round_to(__nv_bfloat16, float x) { return round_bf16(x); }

// out = product (+ bias), rounded to out's type; and, for experts without a gate, A = act(out).
template <class T>
struct StoreRows {
  static constexpr int kMatrices = 1;
  struct Params {
    RowArray out;       // [M, N]; data may be null if A is wanted
    RowArray a;         // [M, N] of T, data is null if not wanted: then out is of T too
    const float* bias;  // [E, N] or null
    int cols;           // N
    bool out_f32;       // float32, else bfloat16
    bool vector;
    ActivationOptions activation;
  };

  // Rows of one tile; this lane's columns start at `col` in the tile.
  template <bool kAligned, bool kPlainSilu>
  class Sink {
   public:
    static constexpr bool kSums = false;

    __device__ Sink(const Params& p, const RowTile& tile, int col, const float*)
        : p_(p), tile_(tile), col_(tile.col + col), vector_(kAligned || p.vector) {
      load_bias(p.bias, tile.expert, p.cols, col_, bias_);
    }
    __device__ __forceinline__ void load(int, int) {}
    __device__ __forceinline__ float store(int, int r, float (&value)[1][8]) const {
      const int count = p_.cols - col_;
      if (r >= tile_.rows || count <= 0) return 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) value[0][i] += bias_[i];
      const int64_t row = tile_.row + r;
      if (p_.out.data != nullptr) store_out(row, count, value[0]);
      if (p_.a.data == nullptr) return 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        value[0][i] = glu<false, sizeof(T) == 4>(p_.activation, round_to(T{}, value[0][i]), 0.0f).a;
      }
      store_8<T>(p_.a.data + row * p_.a.row_bytes + col_ * int64_t{sizeof(T)}, count, vector_,
                 value[0]);
      return 0.0f;
    }

   private:
    __device__ __forceinline__ void store_out(int64_t row, int count,
                                              const float (&value)[8]) const {
      uint8_t* out = p_.out.data + row * p_.out.row_bytes;
      if (p_.out_f32) {
        store_8<float>(out + col_ * int64_t{4}, count, vector_, value);
      } else {
        store_8<__nv_bfloat16>(out + col_ * int64_t{2}, count, vector_, value);
      }
    }

    const Params& p_;
    const RowTile& tile_;
    const int col_;
    const bool vector_;
    float bias_[8];
  };

  template <class Function>
  __device__ __forceinline__ static void dispatch(const Params&, const Function& function) {
    function.template operator()<false>();
  }

  __device__ static void zero_row(const Params& p, int row, int lane) {
    if (p.a.data != nullptr) {
      zero_elements<T>(p.a.data + row * p.a.row_bytes, p.cols, p.vector, lane);
    }
    if (p.out.data == nullptr) return;
    uint8_t* out = p.out.data + row * p.out.row_bytes;
    if (p.out_f32) {
      zero_elements<float>(out, p.cols, p.vector, lane);
    } else {
      zero_elements<__nv_bfloat16>(out, p.cols, p.vector, lane);
    }
  }
};

// h = (gate, up) + biases, and A from h as it is rounded to T, for gated experts. A tile holds
// columns of gate in its left half and the same columns of up in its right half.
template <class T>
struct SwigluRows {
  static constexpr int kMatrices = 2;
  struct Params {
    RowArray h;  // planes gate, up of [M, I]; data is null if h is not wanted
    RowArray a;  // [M, I]
    const float* gate_bias;
    const float* up_bias;
    int cols;  // I
    ActivationOptions activation;
    bool vector;
  };

  template <bool kAligned, bool kPlainSilu>
  class Sink {
   public:
    static constexpr bool kSums = false;

    __device__ Sink(const Params& p, const RowTile& tile, int col, const float*)
        : p_(p), tile_(tile), col_(tile.col + col), vector_(kAligned || p.vector) {
      load_bias(p.gate_bias, tile.expert, p.cols, col_, gate_bias_);
      load_bias(p.up_bias, tile.expert, p.cols, col_, up_bias_);
    }
    __device__ __forceinline__ void load(int, int) {}
    __device__ __forceinline__ float store(int, int r, float (&value)[2][8]) const {
      const int count = p_.cols - col_;
      if (r >= tile_.rows || count <= 0) return 0.0f;
      auto &gate = value[0], &up = value[1];
      float a[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        gate[i] = round_to(T{}, gate[i] + gate_bias_[i]);
        up[i] = round_to(T{}, up[i] + up_bias_[i]);
        a[i] = glu<kPlainSilu, sizeof(T) == 4>(p_.activation, gate[i], up[i]).a;
      }
      const int64_t row = tile_.row + r, offset = static_cast<int64_t>(col_) * sizeof(T);
      if (p_.h.data != nullptr) {
        uint8_t* h = p_.h.data + row * p_.h.row_bytes + offset;
        store_8<T>(h, count, vector_, gate);
        store_8<T>(h + p_.h.plane_bytes, count, vector_, up);
      }
      store_8<T>(p_.a.data + row * p_.a.row_bytes + offset, count, vector_, a);
      return 0.0f;
    }

   private:
    const Params& p_;
    const RowTile& tile_;
    const int col_;
    const bool vector_;
    float gate_bias_[8], up_bias_[8];
  };

  template <class Function>
  __device__ __forceinline__ static void dispatch(const Params& p, const Function& function) {
    with_activation(p.activation, function);
  }

  __device__ static void zero_row(const Params& p, int row, int lane) {
    zero_elements<T>(p.a.data + row * p.a.row_bytes, p.cols, p.vector, lane);
    if (p.h.data == nullptr) return;
    uint8_t* h = p.h.data + row * p.h.row_bytes;
    zero_elements<T>(h, p.cols, p.vector, lane);
    zero_elements<T>(h + p.h.plane_bytes, p.cols, p.vector, lane);
  }
};

// From dA' = dy * down^T, h and the routing weight p: dh = p dA' times A's gradient, pA, and the
// row's sum of dA' * A over this tile's columns.
template <class T>
struct DswigluRows {
  static constexpr int kMatrices = 1;
  struct Params {
    RowArray h;                  // planes gate, up of [M, I]; read only
    RowArray dh;                 // as h
    RowArray pa;                 // [M, I]
    float* row_sums;             // [column tiles, M]
    const float* weights;        // [T, K]
    const int32_t* slot_of_row;  // [M]
    int slots;                   // T * K
    int rows;                    // M
    int cols;                    // I
    ActivationOptions activation;
    bool vector;
  };

  // The routing weight of a row.
  __device__ __forceinline__ static float scalar(const Params& p, int row) {
    const int slot = __ldg(p.slot_of_row + row);
    return slot >= 0 && slot < p.slots ? __ldg(p.weights + slot) : 0.0f;
  }

  template <bool kAligned, bool kPlainSilu>
  class Sink {
   public:
    static constexpr bool kSums = true;

    __device__ Sink(const Params& p, const RowTile& tile, int col, const float* weights)
        : p_(p),
          tile_(tile),
          weights_(weights),
          col_(tile.col + col),
          vector_(kAligned || p.vector),
          gated_(kPlainSilu || p.activation.gated) {}
    __device__ __forceinline__ void load(int i, int r) {
      const uint8_t* h = p_.h.data + (tile_.row + r) * p_.h.row_bytes + offset();
      load_8<T>(h, count(r), vector_, gate_[i]);
      load_8<T>(h + p_.h.plane_bytes, gated_ ? count(r) : 0, vector_, up_[i]);
    }
    // Returns the sum of dA' * A over these columns.
    __device__ __forceinline__ float store(int i, int r, const float (&d)[1][8]) {
      const int count = this->count(r);
      const float weight = weights_[r];
      auto &gate = gate_[i], &up = up_[i];
      float pa[8], sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const GluValue value = glu<kPlainSilu, sizeof(T) == 4>(p_.activation, gate[j], up[j]);
        const float pd = weight * d[0][j];
        if (j < count) sum += d[0][j] * value.a;
        pa[j] = weight * value.a;
        gate[j] = pd * value.d_gate;
        up[j] = pd * value.d_up;
      }
      if (count <= 0) return sum;
      const int64_t row = tile_.row + r;
      uint8_t* dh = p_.dh.data + row * p_.dh.row_bytes + offset();
      store_8<T>(dh, count, vector_, gate);
      if (gated_) store_8<T>(dh + p_.dh.plane_bytes, count, vector_, up);
      store_8<T>(p_.pa.data + row * p_.pa.row_bytes + offset(), count, vector_, pa);
      return sum;
    }

   private:
    __device__ __forceinline__ int count(int r) const {
      return r < tile_.rows ? p_.cols - col_ : 0;
    }
    __device__ __forceinline__ int64_t offset() const {
      return static_cast<int64_t>(col_) * sizeof(T);
    }

    const Params& p_;
    const RowTile& tile_;
    const float* const weights_;
    const int col_;
    const bool vector_, gated_;
    float gate_[4][8], up_[4][8];
  };

  __device__ __forceinline__ static void store_sum(const Params& p, int row, int col_tile,
                                                   float sum) {
    p.row_sums[static_cast<int64_t>(col_tile) * p.rows + row] = sum;
  }

  template <class Function>
  __device__ __forceinline__ static void dispatch(const Params& p, const Function& function) {
    with_activation(p.activation, function);
  }

  __device__ static void zero_row(const Params& p, int row, int lane) {
    uint8_t* dh = p.dh.data + row * p.dh.row_bytes;
    zero_elements<T>(dh, p.cols, p.vector, lane);
    if (p.activation.gated) zero_elements<T>(dh + p.dh.plane_bytes, p.cols, p.vector, lane);
    zero_elements<T>(p.pa.data + row * p.pa.row_bytes, p.cols, p.vector, lane);
  }
};

}  // namespace dropless::cuda
