// Group-limited selection over a warp: lane l holds the keys of experts l, l + 32, l + 64, ...;
// groups are runs of experts of equal size.
#pragma once

#include <cstdint>

#include "cuda/tile/ordered_key.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

// The two largest of a set of keys; of equal ones both count.
struct BestTwo {
  uint32_t first = kNoKey;
  uint32_t second = kNoKey;
};

__device__ inline BestTwo best_of(const BestTwo& a, const BestTwo& b) {
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

__device__ inline BestTwo best_of_lanes(const BestTwo& kept, const BestTwo& sent, int distance) {
  return best_of(kept, {__shfl_xor_sync(kFullWarp, sent.first, distance),
                        __shfl_xor_sync(kFullWarp, sent.second, distance)});
}

// Where a group has more rows than kRows, pairs of rows at that distance get the best of both.
template <int kRows, int V>
__device__ void join_rows(BestTwo (&best)[V], int size) {
  if constexpr (kRows < V) {
    if (size > kWarpSize * kRows) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if ((j & kRows) == 0) best[j] = best[j + kRows] = best_of(best[j], best[j + kRows]);
      }
    }
    join_rows<2 * kRows>(best, size);
  }
}

// Lanes at `distance` exchange one half of 2 kHalf rows each and keep the other, and so on until
// each has one row.
template <int kHalf, int V>
__device__ void exchange_rows(BestTwo (&best)[V], int& distance) {
  if constexpr (kHalf > 0) {
    const bool keeps_upper = (lane_id() & distance) != 0;
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const BestTwo kept = keeps_upper ? best[j + kHalf] : best[j];
      const BestTwo sent = keeps_upper ? best[j] : best[j + kHalf];
      best[j] = best_of_lanes(kept, sent, distance);
    }
    distance /= 2;
    exchange_rows<kHalf / 2>(best, distance);
  }
}

// The two largest keys of every group of `size` experts, a power of two and at least V: lane l gets
// those of the group of its expert in row (l mod s) V / s, s = min(size, 32). Row j is every lane's
// key j. All rows are reduced together, in as many steps as a group has lanes in powers of two.
template <int V>
__device__ BestTwo best_two_of_groups(const uint32_t (&keys)[V], int size) {
  BestTwo best[V];
#pragma unroll
  for (int j = 0; j < V; ++j) best[j].first = keys[j];
  join_rows<1>(best, size);
  int distance = min(size, kWarpSize) / 2;
  exchange_rows<V / 2>(best, distance);
  for (; distance > 0; distance /= 2) best[0] = best_of_lanes(best[0], best[0], distance);
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

// The groups that are kept, a bit each, of at most 32; `key` is lane g's of group g.
__device__ inline unsigned keep_groups(uint32_t key, int groups_kept) {
  unsigned kept = 0;
  for (int i = 0; i < groups_kept; ++i) {
    const uint32_t best = __reduce_max_sync(kFullWarp, key);
    const int winner = __ffs(__ballot_sync(kFullWarp, key == best)) - 1;
    kept |= 1u << winner;
    if (lane_id() == winner) key = kNoKey;
  }
  return kept;
}

// Replaces the keys of groups that are not kept, as router::mask_groups does. At most 32 groups:
// lane g ranks group g.
template <int V>
__device__ void mask_groups(int groups, int groups_kept, int score_experts, uint32_t masked,
                            int num_experts, uint32_t (&keys)[V]) {
  const int lane = lane_id();
  const int size = num_experts / groups;
  const int log2_size = 31 - __clz(size);
  const bool is_power = size == 1 << log2_size;
  uint32_t group_key = kNoKey;
  // 32 groups at most, so that a size that is a power of two is V at least.
  if (is_power && score_experts <= 2) {
    const BestTwo best = best_two_of_groups(keys, size);
    float sum = key_value(best.first);
    if (score_experts == 2) sum += key_value(best.second);
    const int first = lane * size;  // of group `lane`, if there is one
    const int holder = first % kWarpSize + first / kWarpSize * min(size, kWarpSize) / V;
    group_key = __shfl_sync(kFullWarp, ordered_key(sum), holder % kWarpSize);
  } else {
    for (int g = 0; g < groups; ++g) {
      const uint32_t key = ordered_key(sum_of_best(keys, g * size, size, score_experts));
      if (lane == g) group_key = key;
    }
  }
  const unsigned kept = keep_groups(lane < groups ? group_key : kNoKey, groups_kept);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    const int group = is_power ? e >> log2_size : e / size;
    if (e >= num_experts) {
      keys[j] = kNoKey;
    } else if ((kept >> group & 1u) == 0) {
      keys[j] = masked;
    }
  }
}

}  // namespace dropless::cuda
