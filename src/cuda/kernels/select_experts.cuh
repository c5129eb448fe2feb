// Top-k over a warp: lane l holds the keys of experts l, l + 32, l + 64, ...
#pragma once

#include <cstdint>

#include "cuda/tile/ordered_key.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

// Keys per lane up to which a lane sorts them before the selection; sorting more costs more than it
// saves.
constexpr int kMaxSortedKeys = 8;

// Sorts a lane's keys, largest first and equal ones in their order, by odd-even transposition.
// Returns their old places, four bits each, the first in the lowest bits.
template <int V>
__device__ uint32_t sort_keys(uint32_t (&keys)[V]) {
  static_assert(V <= kMaxSortedKeys, "the places must fit 32 bits");
  int place[V];
#pragma unroll
  for (int j = 0; j < V; ++j) place[j] = j;
#pragma unroll
  for (int pass = 0; pass < V; ++pass) {
#pragma unroll
    for (int j = pass % 2; j + 1 < V; j += 2) {
      const bool swap = keys[j + 1] > keys[j];
      const uint32_t larger = max(keys[j], keys[j + 1]);
      keys[j + 1] = min(keys[j], keys[j + 1]);
      keys[j] = larger;
      const int first = swap ? place[j + 1] : place[j];
      place[j + 1] = swap ? place[j] : place[j + 1];
      place[j] = first;
    }
  }
  uint32_t places = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) places |= static_cast<uint32_t>(place[j]) << (4 * j);
  return places;
}

// Whether this lane's `key` is the largest of the warp; of equal ones the lowest expert wins.
__device__ inline bool wins_selection(uint32_t key, int expert) {
  bool wins = key == __reduce_max_sync(kFullWarp, key);
  if (__popc(__ballot_sync(kFullWarp, wins)) > 1) {
    const unsigned candidate = wins ? expert : kFullWarp;
    wins = __reduce_min_sync(kFullWarp, candidate) == candidate && wins;
  }
  return wins;
}

// Takes the K best keys one after another, spending them, and leaves their experts in `chosen` [K],
// shared memory of the warp.
template <int V>
__device__ void select_experts(uint32_t (&keys)[V], int experts_per_token, int* chosen) {
  const int lane = lane_id();
  if constexpr (V <= kMaxSortedKeys) {
    uint32_t places = sort_keys(keys);
    for (int k = 0; k < experts_per_token; ++k) {
      const int expert = lane + kWarpSize * static_cast<int>(places & 0xF);
      if (!wins_selection(keys[0], expert)) continue;
      chosen[k] = expert;
      places >>= 4;
#pragma unroll
      for (int j = 0; j + 1 < V; ++j) keys[j] = keys[j + 1];
      keys[V - 1] = kNoKey;
    }
  } else {
    for (int k = 0; k < experts_per_token; ++k) {
      uint32_t best = keys[0];
      int best_j = 0;
#pragma unroll
      for (int j = 1; j < V; ++j) {
        if (keys[j] > best) {
          best = keys[j];
          best_j = j;
        }
      }
      const bool wins = wins_selection(best, lane + kWarpSize * best_j);
      if (wins) chosen[k] = lane + kWarpSize * best_j;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (wins && j == best_j) keys[j] = kNoKey;
      }
    }
  }
  __syncwarp();
}

// Sum, from the largest down, of the values of the `count` largest keys of a warp, one a lane.
__device__ inline float sum_of_best(uint32_t key, int count) {
  uint32_t best = __reduce_max_sync(kFullWarp, key);
  int holders = __popc(__ballot_sync(kFullWarp, key == best));
  float sum = key_value(best);
  // Equal keys are added once for each of their lanes.
  for (int taken = 1; taken < count; ++taken, --holders) {
    if (holders == 1) {
      key = key < best ? key : kNoKey;
      best = __reduce_max_sync(kFullWarp, key);
      holders = 1 + __popc(__ballot_sync(kFullWarp, key == best));
    }
    sum += key_value(best);
  }
  return sum;
}

// The same for the keys of experts first .. first + size - 1, wherever lanes hold them.
template <int V>
__device__ float sum_of_best(const uint32_t (&keys)[V], int first, int size, int count) {
  float sum = 0.0f;
  uint32_t below = 0xFFFFFFFFu;  // above the key of +inf
  while (count > 0) {
    uint32_t best = kNoKey;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int e = lane_id() + kWarpSize * j - first;
      if (e >= 0 && e < size && keys[j] < below) best = max(best, keys[j]);
    }
    best = __reduce_max_sync(kFullWarp, best);
    int holders = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int e = lane_id() + kWarpSize * j - first;
      holders += e >= 0 && e < size && keys[j] == best ? 1 : 0;
    }
    holders = __reduce_add_sync(kFullWarp, holders);
    for (; holders > 0 && count > 0; --holders, --count) sum += key_value(best);
    below = best;
  }
  return sum;
}

// Replaces the keys of groups that are not kept, as router::mask_groups does. At most 32 groups:
// lane g ranks group g.
template <int V>
__device__ void mask_groups(int groups, int groups_kept, int score_experts, uint32_t masked,
                            int num_experts, uint32_t (&keys)[V]) {
  const int lane = lane_id();
  const int size = num_experts / groups;
  const bool is_row = size == kWarpSize;  // group j is every lane's key j
  uint32_t group_key = kNoKey;
  if (is_row) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (j >= groups) continue;
      const uint32_t key = ordered_key(sum_of_best(keys[j], score_experts));
      if (lane == j) group_key = key;
    }
  } else {
    for (int g = 0; g < groups; ++g) {
      const uint32_t key = ordered_key(sum_of_best(keys, g * size, size, score_experts));
      if (lane == g) group_key = key;
    }
  }
  int better = 0;
  for (int g = 0; g < groups; ++g) {
    const uint32_t other = __shfl_sync(kFullWarp, group_key, g);
    better += other > group_key || (other == group_key && g < lane) ? 1 : 0;
  }
  const unsigned kept = __ballot_sync(kFullWarp, lane < groups && better < groups_kept);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    const int group = is_row ? j : e / size;
    if (e < num_experts && (kept >> group & 1u) == 0) keys[j] = masked;
  }
}

}  // namespace dropless::cuda
