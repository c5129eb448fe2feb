// The dispatch plan: a stable counting sort of slots by expert, in two launches.
//
// The first one (here for given ids, in route.cuh together with the scores) counts each chunk of
// tokens and ranks its slots; the second one adds up the chunks before and places the rows. No
// order of blocks or atomics enters the result.
#pragma once

#include <cstdint>

#include "cuda/kernels/route.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

struct CountSlotsParams {
  const int32_t* ids;  // [T, K]
  int32_t* rank;       // [T, K]
  int32_t* counts;     // [chunks, E]
  int tokens;
  int num_experts;
  int experts_per_token;
  int tokens_per_chunk;
};

// Grid: chunks. Shared: [warps, E] int32.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) count_slots_kernel(CountSlotsParams p) {
  constexpr int kWarps = kThreads / kWarpSize;
  extern __shared__ int shared[];
  const int lane = lane_id();
  const int num_experts = p.num_experts;
  // Fewer than 2^31 slots in all, so those of one chunk fit an int.
  const int chunk_slots = p.tokens_per_chunk * p.experts_per_token;
  const int64_t chunk_begin = static_cast<int64_t>(blockIdx.x) * chunk_slots;
  const int slots = static_cast<int>(min(
      int64_t{chunk_slots}, static_cast<int64_t>(p.tokens) * p.experts_per_token - chunk_begin));
  // Whole steps of 32 slots, so that a step belongs to one warp.
  const int slots_per_warp = (slots + kWarpSize * kWarps - 1) / (kWarpSize * kWarps) * kWarpSize;
  const int begin = threadIdx.x / kWarpSize * slots_per_warp;
  const int end = min(begin + slots_per_warp, slots);

  int* histogram = shared + threadIdx.x / kWarpSize * num_experts;
  for (int e = lane; e < num_experts; e += kWarpSize) histogram[e] = 0;
  __syncwarp();
  for (int step = begin; step < end; step += kWarpSize) {
    const int slot = step + lane;
    int id = slot < end ? p.ids[chunk_begin + slot] : -1;
    if (id >= num_experts) id = -1;
    // Lanes with the same expert take consecutive ranks in lane order.
    const unsigned same = __match_any_sync(kFullWarp, id);
    const int lower = __popc(same & ((1u << lane) - 1u));
    const int before = id >= 0 ? histogram[id] : 0;
    __syncwarp();
    if (id >= 0) {
      p.rank[chunk_begin + slot] = before + lower;
      if (lower == 0) histogram[id] = before + __popc(same);
    }
    __syncwarp();
  }

  __syncthreads();
  scan_over_warps<kWarps>(shared, num_experts,
                          p.counts + static_cast<int64_t>(blockIdx.x) * num_experts);
  __syncthreads();
  add_ranks_of_warps(shared, num_experts, slots, slots_per_warp, p.ids + chunk_begin,
                     p.rank + chunk_begin);
}

struct PlaceRowsParams {
  const int32_t* ids;           // [T, K]
  const int32_t* chunk_counts;  // [chunks, E]
  // Statistics of route, null in plan.
  const float* chunk_prob_sum;    // [chunks, E]
  const float* chunk_sums;        // [chunks, 2]
  const int32_t* chunk_counters;  // [chunks, 2]
  float* prob_sum;                // [E]
  float* sums;                    // [2]
  int32_t* counters;              // [2]
  int32_t* counts;                // [E]
  int32_t* offsets;               // [E+1]
  int32_t* slot_of_row;           // [M]
  int32_t* row_of_slot;           // [T, K]: the rank in the chunk before, the row after
  int64_t capacity;               // 0: none
  int tokens;
  int num_experts;
  int experts_per_token;
  int tokens_per_chunk;
  int chunks;
};

constexpr int kPlaceThreads = 1024;  // one thread an expert at E = 1024

// What a block of the second launch knows of every expert.
struct ExpertPlaces {
  int before[kPlaceThreads];      // slots in chunks before this block's
  int offset[kPlaceThreads + 1];  // first row
  int partial[2][kPlaceThreads];
  int warp_total[kPlaceThreads / kWarpSize];
};

// Sums each expert's counts over all chunks and over those before `chunk`, then scans over experts.
// Thread e < E returns expert e's total.
__device__ inline int place_experts(const PlaceRowsParams& p, int chunk, ExpertPlaces& places) {
  const int tid = threadIdx.x;
  const int columns = (p.num_experts + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int row_groups = columns > 0 ? kPlaceThreads / columns : 0;
  const int e = columns > 0 ? tid % columns : 0;
  const int row_group = columns > 0 ? tid / columns : 0;
  int total = 0;
  int before = 0;
  if (row_group < row_groups && e < p.num_experts) {
#pragma unroll 8
    for (int c = row_group; c < p.chunks; c += row_groups) {
      const int count = p.chunk_counts[c * p.num_experts + e];
      total += count;
      before += c < chunk ? count : 0;
    }
  }
  places.partial[0][tid] = total;
  places.partial[1][tid] = before;
  __syncthreads();
  total = before = 0;
  if (tid < p.num_experts) {
    for (int g = 0; g < row_groups; ++g) {
      total += places.partial[0][g * columns + tid];
      before += places.partial[1][g * columns + tid];
    }
    places.before[tid] = before;
  }
  const int kept = p.capacity > 0 ? static_cast<int>(min(int64_t{total}, p.capacity)) : total;
  int offset = warp_exclusive_scan(kept);
  if (lane_id() == kWarpSize - 1) places.warp_total[tid / kWarpSize] = offset + kept;
  __syncthreads();
  if (tid < kWarpSize) {
    // kPlaceThreads / 32 = 32 warps: one lane each.
    places.warp_total[tid] = warp_exclusive_scan(places.warp_total[tid]);
  }
  __syncthreads();
  offset += places.warp_total[tid / kWarpSize];
  places.offset[tid] = offset;
  if (tid == kPlaceThreads - 1) places.offset[kPlaceThreads] = offset + kept;
  __syncthreads();
  return total;
}

// Adds the chunks' statistics, each sum by one warp in an order that depends on T alone.
__device__ inline void sum_statistics(const PlaceRowsParams& p) {
  const int warps = kPlaceThreads / kWarpSize;
  const int lane = lane_id();
  const int first = blockIdx.x * warps + threadIdx.x / kWarpSize;
  // Items 0 .. E-1 are the experts, E and E+1 the two sums with their counters.
  for (int item = first; item < p.num_experts + 2; item += gridDim.x * warps) {
    const bool is_expert = item < p.num_experts;
    const int i = is_expert ? item : item - p.num_experts;
    const float* from = is_expert ? p.chunk_prob_sum + i : p.chunk_sums + i;
    const int stride = is_expert ? p.num_experts : 2;
    float sum = 0.0f;
    int64_t count = 0;
    for (int c = lane; c < p.chunks; c += kWarpSize) {
      sum += from[c * stride];
      if (!is_expert) count += p.chunk_counters[c * 2 + i];
    }
    sum = warp_sum(sum);
    count = warp_sum(count);
    if (lane != 0) continue;
    if (is_expert) {
      p.prob_sum[i] = sum;
    } else {
      p.sums[i] = sum;
      // T*E may pass int32: the largest count it can hold says "many" as well.
      p.counters[i] = static_cast<int32_t>(min(count, int64_t{INT32_MAX}));
    }
  }
}

// Grid: max(chunks, 1). Block: kPlaceThreads.
__global__ void __launch_bounds__(kPlaceThreads) place_rows_kernel(PlaceRowsParams p) {
  __shared__ ExpertPlaces places;
  const int tid = threadIdx.x;
  const int chunk = blockIdx.x;
  const int total = place_experts(p, chunk, places);
  if (chunk == 0) {
    if (tid < p.num_experts) p.counts[tid] = total;
    if (tid < p.num_experts) p.offsets[tid] = places.offset[tid];
    if (tid == 0) p.offsets[p.num_experts] = places.offset[p.num_experts];
  }

  const int64_t rows = static_cast<int64_t>(p.tokens) * p.experts_per_token;
  const int64_t chunk_slots = static_cast<int64_t>(p.tokens_per_chunk) * p.experts_per_token;
  const int64_t begin = chunk * chunk_slots;
  const int64_t end = min(begin + chunk_slots, rows);
  for (int64_t slot = begin + tid; slot < end; slot += kPlaceThreads) {
    const int id = p.ids[slot];
    int row = -1;
    if (id >= 0 && id < p.num_experts) {
      const int rank = places.before[id] + p.row_of_slot[slot];
      if (p.capacity == 0 || rank < p.capacity) {
        row = places.offset[id] + rank;
        p.slot_of_row[row] = static_cast<int32_t>(slot);
      }
    }
    p.row_of_slot[slot] = row;
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kPlaceThreads;
  for (int64_t row =
           places.offset[p.num_experts] + static_cast<int64_t>(chunk) * kPlaceThreads + tid;
       row < rows; row += stride) {
    p.slot_of_row[row] = -1;
  }
  if (p.chunk_prob_sum != nullptr) sum_statistics(p);
}

}  // namespace dropless::cuda
