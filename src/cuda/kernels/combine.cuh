// Moving rows between token order and expert order. Every kernel here is bound by memory: a lane
// moves 16 bytes an access where widths and addresses allow it, and keeps several accesses in
// flight.
#pragma once

#include <cstdint>

#include "cuda/tile/element.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

// Token of a slot, or -1 if there is none. 32-bit: a 64-bit division takes about 100 instructions.
__device__ inline int token_of_slot(int slot, int experts_per_token, int tokens) {
  if (slot < 0) return -1;
  const int token = slot / experts_per_token;
  return token < tokens ? token : -1;
}

// Calls clear(row) by a whole warp for each row without a slot, of one block's `blockDim.x` rows.
template <class Clear>
__device__ void for_rows_without_slot(const int32_t* slot_of_row, int64_t block, int64_t num_rows,
                                      int experts_per_token, int tokens, const Clear& clear) {
  const int64_t first = block * blockDim.x + threadIdx.x / kWarpSize * kWarpSize;
  const int64_t row = first + lane_id();
  const bool empty =
      row < num_rows && token_of_slot(slot_of_row[row], experts_per_token, tokens) < 0;
  for (unsigned left = __ballot_sync(kFullWarp, empty); left != 0; left &= left - 1) {
    clear(first + __ffs(static_cast<int>(left)) - 1);
  }
}

struct PermuteParams {
  const uint8_t* x;            // [T, H] as bytes: [T, row_bytes]
  const int32_t* slot_of_row;  // [M]
  const int32_t* row_of_slot;  // [T, K] or null
  uint8_t* rows;               // [M, H] as bytes
  int64_t row_bytes;
  int64_t num_rows;
  int experts_per_token;
  int tokens;
};

// Accesses that one warp has in flight: 8 of 512 bytes, so that few warps fill the memory pipes.
constexpr int kPermuteUnroll = 8;

// kPermuteUnroll * 32 words of a row, from the blockIdx.y-th of such segments on, held by a warp.
template <class Word>
struct RowSegment {
  Word held[kPermuteUnroll];
  int64_t first;
  int64_t words;  // of the row

  __device__ explicit RowSegment(int64_t row_bytes)
      : held(),
        first(static_cast<int64_t>(blockIdx.y) * (kPermuteUnroll * kWarpSize) + lane_id()),
        words(row_bytes / static_cast<int64_t>(sizeof(Word))) {}
  __device__ void load(const uint8_t* row) {
#pragma unroll
    for (int i = 0; i < kPermuteUnroll; ++i) {
      const int64_t word = first + i * kWarpSize;
      if (word < words) held[i] = reinterpret_cast<const Word*>(row)[word];
    }
  }
  __device__ void store(uint8_t* row) const {
#pragma unroll
    for (int i = 0; i < kPermuteUnroll; ++i) {
      const int64_t word = first + i * kWarpSize;
      if (word < words) reinterpret_cast<Word*>(row)[word] = held[i];
    }
  }
};

// By rows. Grid: (ceil(M / warps), segments of a row).
template <class Word>
__global__ void permute_kernel(PermuteParams p) {
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
  if (row >= p.num_rows) return;
  const int64_t token = token_of_slot(p.slot_of_row[row], p.experts_per_token, p.tokens);
  RowSegment<Word> segment(p.row_bytes);
  if (token >= 0) segment.load(p.x + token * p.row_bytes);
  segment.store(p.rows + row * p.row_bytes);
}

// By rows, those of the groups alone, which are ordered by token inside a group. The blocks of one
// wave work on the same share of every group, so that a token's copies read it at about the same
// time: from L2 all but once. Grid: (E times a number of shares, segments of a row).
template <class Word>
__global__ void permute_groups_kernel(PermuteParams p, const int32_t* offsets /* [E+1] */,
                                      int experts) {
  const int warps = blockDim.x / kWarpSize;
  const int64_t expert = blockIdx.x % experts, share = blockIdx.x / experts;
  const int64_t shares = gridDim.x / experts;
  const int64_t begin = max(int64_t{offsets[expert]}, int64_t{0});
  const int64_t count = max(min(int64_t{offsets[expert + 1]}, p.num_rows) - begin, int64_t{0});
  const int64_t end = begin + count * (share + 1) / shares;
  for (int64_t row = begin + count * share / shares + threadIdx.x / kWarpSize; row < end;
       row += warps) {
    const int64_t token = token_of_slot(p.slot_of_row[row], p.experts_per_token, p.tokens);
    RowSegment<Word> segment(p.row_bytes);
    if (token >= 0) segment.load(p.x + token * p.row_bytes);
    segment.store(p.rows + row * p.row_bytes);
  }
}

// By tokens, so that each is read once. Grid: (ceil(T / warps), then enough blocks of blockDim.x
// rows to clear those without a slot; segments of a row).
template <class Word>
__global__ void permute_tokens_kernel(PermuteParams p) {
  const int warps = blockDim.x / kWarpSize;
  const int64_t token_blocks = (p.tokens + warps - 1) / warps;
  RowSegment<Word> segment(p.row_bytes);
  if (blockIdx.x >= token_blocks) {
    for_rows_without_slot(p.slot_of_row, blockIdx.x - token_blocks, p.num_rows, p.experts_per_token,
                          p.tokens,
                          [&](int64_t row) { segment.store(p.rows + row * p.row_bytes); });
    return;
  }
  const int64_t token = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / kWarpSize;
  if (token >= p.tokens) return;
  segment.load(p.x + token * p.row_bytes);
  for (int k = 0; k < p.experts_per_token; ++k) {
    const int64_t row = p.row_of_slot[token * p.experts_per_token + k];
    if (row >= 0 && row < p.num_rows) segment.store(p.rows + row * p.row_bytes);
  }
}

template <class In, class OutElement>
struct CombineParams {
  const In* rows;              // [M, H]
  const int32_t* row_of_slot;  // [T, K]
  const float* weights;        // [T, K] or null
  OutElement* out;             // [T, H]
  int64_t tokens;
  int64_t num_rows;
  int64_t width;  // H
  int experts_per_token;
};

constexpr int kCombineThreads = 256;

// Grid: (tokens, segments). A thread sums kPacks packs of N columns, blockDim.x packs apart, and
// reads kRows rows a step; the order is that of k, in fp32. Four blocks an SM: more registers for
// more accesses a thread measured slower than more threads.
template <class In, class OutElement, int N, int kRows, int kPacks>
__global__ void __launch_bounds__(kCombineThreads, 4)
    combine_kernel(CombineParams<In, OutElement> p) {
  const int64_t t = blockIdx.x;
  const int64_t first_slot = t * p.experts_per_token;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kPacks * blockDim.x + threadIdx.x) * N;
  const int64_t step = static_cast<int64_t>(blockDim.x) * N;
  float sum[kPacks][N] = {};
  for (int k0 = 0; k0 < p.experts_per_token; k0 += kRows) {
    Pack<In, N> held[kRows][kPacks];
    float weight[kRows];
    bool has_row[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int k = k0 + i;
      const int64_t row = k < p.experts_per_token ? p.row_of_slot[first_slot + k] : -1;
      has_row[i] = row >= 0 && row < p.num_rows;
      weight[i] = has_row[i] && p.weights != nullptr ? p.weights[first_slot + k] : 1.0f;
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const int64_t column = first + j * step;
        if (has_row[i] && column < p.width) {
          held[i][j] = Pack<In, N>::load(p.rows + row * p.width + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!has_row[i]) continue;
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
#pragma unroll
        for (int c = 0; c < N; ++c) {
          sum[j][c] = fmaf(weight[i], held[i][j][c], sum[j][c]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = first + j * step;
    if (column >= p.width) continue;
    Pack<OutElement, N>::from(sum[j]).store(p.out + t * p.width + column);
  }
}

template <class Dy, class Row>
struct CombineBackwardParams {
  const Dy* dy;                // [T, H]
  const Row* rows;             // [M, H]
  const int32_t* row_of_slot;  // [T, K]
  const int32_t* slot_of_row;  // [M]
  const float* weights;        // [T, K]
  Row* d_rows;                 // [M, H]
  float* d_weights;            // [T, K]
  int64_t tokens;
  int64_t num_rows;
  int64_t width;  // H
  int experts_per_token;
};

// Rows of a token read at once; more choices take further steps.
constexpr int kCombineBackwardUnroll = 4;
constexpr int kCombineBackwardWarps = 8;

// Grid: T blocks for the tokens, then enough blocks of `blockDim.x` rows to clear those without a
// slot. A token's block reads its dy and each of its rows once.
template <class Dy, class Row, int N>
__global__ void __launch_bounds__(kCombineBackwardWarps* kWarpSize)
    combine_backward_kernel(CombineBackwardParams<Dy, Row> p) {
  constexpr int kRows = kCombineBackwardUnroll;
  __shared__ float partial[kRows][kCombineBackwardWarps];
  if (blockIdx.x >= p.tokens) {
    for_rows_without_slot(p.slot_of_row, blockIdx.x - p.tokens, p.num_rows, p.experts_per_token,
                          static_cast<int>(p.tokens), [&](int64_t row) {
                            for (int64_t column = lane_id() * N; column < p.width;
                                 column += kWarpSize * N) {
                              Pack<Row, N>{}.store(p.d_rows + row * p.width + column);
                            }
                          });
    return;
  }
  const int64_t t = blockIdx.x;
  const int64_t first_slot = t * p.experts_per_token;
  const int warp = threadIdx.x / kWarpSize;
  for (int k0 = 0; k0 < p.experts_per_token; k0 += kRows) {
    int64_t row[kRows];  // -1: none
    float weight[kRows] = {};
    float dot[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row[i] = k0 + i < p.experts_per_token ? p.row_of_slot[first_slot + k0 + i] : -1;
      if (row[i] >= p.num_rows) row[i] = -1;
      if (row[i] >= 0) weight[i] = p.weights[first_slot + k0 + i];
    }
    for (int64_t column = threadIdx.x * N; column < p.width; column += blockDim.x * N) {
      const Pack<Dy, N> gradient = Pack<Dy, N>::load(p.dy + t * p.width + column);
      Pack<Row, N> value[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (row[i] >= 0) value[i] = Pack<Row, N>::load(p.rows + row[i] * p.width + column);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (row[i] < 0) continue;
        float d_row[N];
#pragma unroll
        for (int c = 0; c < N; ++c) {
          const float g = gradient[c];
          dot[i] = fmaf(g, value[i][c], dot[i]);
          d_row[c] = weight[i] * g;
        }
        Pack<Row, N>::from(d_row).store(p.d_rows + row[i] * p.width + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      dot[i] = warp_sum(dot[i]);
      if (lane_id() == 0) partial[i][warp] = dot[i];
    }
    __syncthreads();
    if (threadIdx.x < kRows && k0 + static_cast<int>(threadIdx.x) < p.experts_per_token) {
      // A slot without a row has only zeros here.
      float total = 0.0f;
      for (int w = 0; w < kCombineBackwardWarps; ++w) total += partial[threadIdx.x][w];
      p.d_weights[first_slot + k0 + threadIdx.x] = total;
    }
    __syncthreads();
  }
}

template <class T>
struct GroupSumParams {
  const T* x;                  // [M or T, P*N]
  const int32_t* slot_of_row;  // [M], null without gather and weights
  const float* weights;        // [T, K] or null
  const int32_t* offsets;      // [E+1]
  float* out;                  // [E, P*N]
  int64_t num_rows;            // M
  int64_t source_rows;         // rows of x
  int64_t num_slots;           // T*K, the size of weights
  int64_t width;               // P*N
  int num_experts;
  int experts_per_token;
  bool gather;
};

constexpr int kGroupSumWarps = 16;

// Grid: (segments of 32 N columns, E). Warp w sums rows w, w + 16, ... of its expert, and the
// warps' sums are added in order.
template <class T, int N>
__global__ void __launch_bounds__(kGroupSumWarps* kWarpSize) group_sum_kernel(GroupSumParams<T> p) {
  __shared__ float partial[kGroupSumWarps][kWarpSize * N];
  const int warp = threadIdx.x / kWarpSize;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * (kWarpSize * N);
  const int64_t column = first_column + lane_id() * N;
  const int64_t e = blockIdx.y;
  const int64_t begin = max(int64_t{p.offsets[e]}, int64_t{0});
  const int64_t end = min(int64_t{p.offsets[e + 1]}, p.num_rows);
  float sum[N] = {};
  if (column < p.width) {
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += kGroupSumWarps) {
      const int slot = p.slot_of_row != nullptr ? p.slot_of_row[row] : 0;
      const int64_t index = p.gather ? (slot >= 0 ? slot / p.experts_per_token : -1) : row;
      const bool weighted = p.weights != nullptr;
      if (index < 0 || index >= p.source_rows) continue;
      if (weighted && (slot < 0 || slot >= p.num_slots)) continue;
      const float weight = weighted ? p.weights[slot] : 1.0f;
      const Pack<T, N> value = Pack<T, N>::load(p.x + index * p.width + column);
#pragma unroll
      for (int c = 0; c < N; ++c) sum[c] = fmaf(weight, value[c], sum[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < N; ++c) partial[warp][lane_id() * N + c] = sum[c];
  __syncthreads();
  for (int c = threadIdx.x; c < kWarpSize * N; c += blockDim.x) {
    if (first_column + c >= p.width) continue;
    float total = 0.0f;
    for (int w = 0; w < kGroupSumWarps; ++w) total += partial[w][c];
    p.out[e * p.width + first_column + c] = total;
  }
}

}  // namespace dropless::cuda
