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

// The two largest of a set of keys; of equal ones both count.
struct BestTwo {
  uint32_t first = kNoKey;
  uint32_t second = kNoKey;
};

__device__ inline BestTwo best_of(const BestTwo& a, const BestTwo& b) {
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

// The two largest of each row of 32 keys, row j being every lane's key j: lane l gets those of row
// l / (32 / V). At every step lanes exchange the rows that they do not keep, so that all rows are
// reduced in 5 steps together.
template <int V>
__device__ BestTwo best_two_of_rows(const uint32_t (&keys)[V]) {
  BestTwo best[V];
#pragma unroll
  for (int j = 0; j < V; ++j) best[j].first = keys[j];
  int rows = V;
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const bool keeps_upper = (lane_id() & distance) != 0;
    const int half = rows / 2;
#pragma unroll
    for (int j = 0; j < (half > 0 ? half : 1); ++j) {
      const BestTwo kept = half > 0 && keeps_upper ? best[j + half] : best[j];
      const BestTwo sent = half > 0 && !keeps_upper ? best[j + half] : best[j];
      const BestTwo received = {__shfl_xor_sync(kFullWarp, sent.first, distance),
                                __shfl_xor_sync(kFullWarp, sent.second, distance)};
      best[j] = best_of(kept, received);
    }
    rows = half > 0 ? half : 1;
  }
  return best[0];
}

// Sum, from the largest down, of the values of the `count` largest keys of experts first ..
// first + size - 1, wherever lanes hold them.
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
  if (is_row && score_experts <= 2) {
    const BestTwo best = best_two_of_rows(keys);
    float sum = key_value(best.first);
    if (score_experts == 2) sum += key_value(best.second);
    const int holder = lane * (kWarpSize / V);  // of group `lane`, if there is one
    group_key = __shfl_sync(kFullWarp, ordered_key(sum), holder % kWarpSize);
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
