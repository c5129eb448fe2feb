// The dispatch plan: a stable counting sort of slots by expert, in two launches.
//
// The first one (here for given ids, in route.cuh together with the scores) counts each chunk of
// tokens and ranks its slots; the second one adds up the chunks before and places the rows. No
// order of blocks or atomics enters the result.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/routing_chunks.h"
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

// Adds to the rank of every slot of a chunk the slots that precede its warp; warps own equal runs
// of `slots_per_warp` slots. `ids` and `rank` [slots] are the chunk's.
__device__ inline void add_ranks_of_warps(const int* before_warp, int num_experts, int slots,
                                          int slots_per_warp, const int32_t* ids, int32_t* rank) {
  for (int i = threadIdx.x; i < slots; i += blockDim.x) {
    const int id = ids[i];
    if (id >= 0 && id < num_experts) rank[i] += before_warp[i / slots_per_warp * num_experts + id];
  }
}

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
  int32_t* counts = p.counts + static_cast<int64_t>(blockIdx.x) * num_experts;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    scan_warps<kWarps>(shared + e, num_experts, counts + e);
  }
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
  // Of each group of chunks, [groups, E]: all slots, and those before this block's.
  alignas(16) int total_of_group[4 * kPlaceThreads];
  alignas(16) int before_of_group[4 * kPlaceThreads];
  int warp_total[kPlaceThreads / kWarpSize];
};

// Each thread adds up `kWidth` experts' counts over every `groups`-th chunk: [groups, E] partial
// sums. The block waits on memory once, so all of a thread's loads are asked for before the first
// is used, 16 bytes each where the rows of counts allow it. Returns the number of groups.
template <int kWidth>
__device__ inline int add_chunks(const PlaceRowsParams& p, int chunk, ExpertPlaces& places) {
  using Counts = std::conditional_t<kWidth == 4, int4, int>;
  // More groups would only leave more to be added by one thread afterwards.
  constexpr int kMaxGroups = 32;
  const int columns = p.num_experts / kWidth;
  if (columns == 0) return 0;
  const int groups = min(kPlaceThreads / columns, kMaxGroups);
  const int group = static_cast<int>(threadIdx.x) / columns;
  const int column = static_cast<int>(threadIdx.x) % columns;
  if (group < groups) {
    Counts total = {};
    Counts before = {};
    const auto add = [](Counts& sum, const Counts& count) {
      if constexpr (kWidth == 4) {
        sum.x += count.x, sum.y += count.y, sum.z += count.z, sum.w += count.w;
      } else {
        sum += count;
      }
    };
    const auto* counts = reinterpret_cast<const Counts*>(p.chunk_counts) + column;
#pragma unroll 8
    for (int c = group; c < p.chunks; c += groups) {
      const Counts count = counts[static_cast<int64_t>(c) * columns];
      add(total, count);
      if (c < chunk) add(before, count);
    }
    reinterpret_cast<Counts*>(places.total_of_group)[group * columns + column] = total;
    reinterpret_cast<Counts*>(places.before_of_group)[group * columns + column] = before;
  }
  return groups;
}

// Sums each expert's counts over all chunks and over those before `chunk`, then scans over experts.
// Thread e < E returns expert e's total.
__device__ inline int place_experts(const PlaceRowsParams& p, int chunk, ExpertPlaces& places) {
  const int tid = threadIdx.x;
  const bool is_wide = p.num_experts % 4 == 0 &&
                       reinterpret_cast<std::uintptr_t>(p.chunk_counts) % sizeof(int4) == 0;
  const int groups = is_wide ? add_chunks<4>(p, chunk, places) : add_chunks<1>(p, chunk, places);
  __syncthreads();
  int total = 0;
  if (tid < p.num_experts) {
    int before = 0;
#pragma unroll 8
    for (int g = 0; g < groups; ++g) {
      total += places.total_of_group[g * p.num_experts + tid];
      before += places.before_of_group[g * p.num_experts + tid];
    }
    places.before[tid] = before;
  }
  const int kept = p.capacity > 0 ? static_cast<int>(min(int64_t{total}, p.capacity)) : total;
  int offset = warp_exclusive_scan(kept);
  if (lane_id() == kWarpSize - 1) places.warp_total[tid / kWarpSize] = offset + kept;
  __syncthreads();
  // kPlaceThreads / 32 = 32 warps: one lane each, in every warp alike, which saves a barrier.
  const int warp_offset = warp_exclusive_scan(places.warp_total[lane_id()]);
  offset += __shfl_sync(kFullWarp, warp_offset, tid / kWarpSize);
  places.offset[tid] = offset;
  if (tid == kPlaceThreads - 1) places.offset[kPlaceThreads] = offset + kept;
  __syncthreads();
  return total;
}

// One of the sums over chunks that one warp adds: items 0 .. E-1 are the experts' probabilities,
// then come the two sums and the two counters.
struct ChunkSum {
  static constexpr int kRows = RoutingChunks::kMaxChunks / kWarpSize;
  uint32_t word[kRows];  // of the chunks lane, lane + 32, ...

  __device__ static int items(const PlaceRowsParams& p) { return p.num_experts + 4; }

  __device__ void load(const PlaceRowsParams& p, int item) {
    const void* from = p.chunk_prob_sum;
    int first = item;
    int stride = p.num_experts;
    if (item >= p.num_experts) {
      first = (item - p.num_experts) % 2;
      stride = 2;
      from = item < p.num_experts + 2 ? static_cast<const void*>(p.chunk_sums) : p.chunk_counters;
    }
    const auto* words = static_cast<const uint32_t*>(from) + first;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int c = lane_id() + kWarpSize * i;
      word[i] = c < p.chunks ? words[static_cast<int64_t>(c) * stride] : 0;
    }
  }

  // In an order that depends on T alone.
  __device__ void store(const PlaceRowsParams& p, int item) const {
    float sum = 0.0f;
    int64_t count = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum += __uint_as_float(word[i]);
      count += static_cast<int32_t>(word[i]);
    }
    if (item < p.num_experts + 2) {
      sum = warp_sum(sum);
    } else {
      count = warp_sum(count);
    }
    if (lane_id() != 0) return;
    if (item < p.num_experts) {
      p.prob_sum[item] = sum;
    } else if (item < p.num_experts + 2) {
      p.sums[item - p.num_experts] = sum;
    } else {
      // T*E may pass int32: the largest count it can hold says "many" as well.
      p.counters[item - p.num_experts - 2] = static_cast<int32_t>(min(count, int64_t{INT32_MAX}));
    }
  }
};

// Grid: max(chunks, 1). Block: kPlaceThreads. Little is computed here: what a thread needs from
// memory is asked for at once, before the block waits for the counts.
__global__ void __launch_bounds__(kPlaceThreads) place_rows_kernel(PlaceRowsParams p) {
  __shared__ ExpertPlaces places;
  const int tid = threadIdx.x;
  const int chunk = blockIdx.x;
  const int64_t rows = static_cast<int64_t>(p.tokens) * p.experts_per_token;
  const int64_t chunk_slots = static_cast<int64_t>(p.tokens_per_chunk) * p.experts_per_token;
  const int64_t begin = chunk * chunk_slots;
  const int64_t end = min(begin + chunk_slots, rows);
  int id = -1;
  int rank = 0;
  if (begin + tid < end) {
    id = p.ids[begin + tid];
    rank = p.row_of_slot[begin + tid];
  }
  // Neighbouring items go to different blocks.
  const int first_item = tid / kWarpSize * static_cast<int>(gridDim.x) + chunk;
  const int items = p.chunk_prob_sum != nullptr ? ChunkSum::items(p) : 0;
  ChunkSum statistic;
  if (first_item < items) statistic.load(p, first_item);

  const int total = place_experts(p, chunk, places);
  if (chunk == 0) {
    if (tid < p.num_experts) p.counts[tid] = total;
    if (tid < p.num_experts) p.offsets[tid] = places.offset[tid];
    if (tid == 0) p.offsets[p.num_experts] = places.offset[p.num_experts];
  }

  for (int64_t slot = begin + tid; slot < end; slot += kPlaceThreads) {
    if (slot != begin + tid) {
      id = p.ids[slot];
      rank = p.row_of_slot[slot];
    }
    int row = -1;
    if (id >= 0 && id < p.num_experts) {
      const int of_expert = places.before[id] + rank;
      if (p.capacity == 0 || of_expert < p.capacity) {
        row = places.offset[id] + of_expert;
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
  const int warps = kPlaceThreads / kWarpSize * static_cast<int>(gridDim.x);
  for (int item = first_item; item < items; item += warps) {
    if (item != first_item) statistic.load(p, item);
    statistic.store(p, item);
  }
}

}  // namespace dropless::cuda
