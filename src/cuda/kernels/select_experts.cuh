// Top-k over a warp: lane l holds the keys of experts l, l + 32, l + 64, ...; V, how many, is a
// power of two.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/kernels/select_groups.cuh"
#include "cuda/tile/ordered_key.cuh"
#include "cuda/tile/warp.cuh"

namespace dropless::cuda {

// Batcher's odd-even merge sort: pairs of places to compare and exchange, in order.
template <int V>
struct SortingNetwork {
  struct Pair {
    int larger, smaller;
  };

  // Calls f(larger, smaller) for every exchange.
  template <class F>
  static constexpr void visit(F&& f) {
    for (int merged = 1; merged < V; merged *= 2) {
      for (int step = merged; step >= 1; step /= 2) {
        for (int start = step % merged; start + step < V; start += 2 * step) {
          for (int i = start; i < start + step; ++i) {
            if (i / (2 * merged) == (i + step) / (2 * merged)) f(i, i + step);
          }
        }
      }
    }
  }

  static constexpr int kPairs = [] {
    int pairs = 0;
    visit([&](int, int) { ++pairs; });
    return pairs;
  }();

  struct Pairs {
    Pair pair[kPairs > 0 ? kPairs : 1] = {};
  };
  static constexpr Pairs kNetwork = [] {
    Pairs all;
    int next = 0;
    visit([&](int larger, int smaller) { all.pair[next++] = {larger, smaller}; });
    return all;
  }();
};

template <int kLarger, int kSmaller, int V>
__device__ void exchange(uint32_t (&keys)[V]) {
  const uint32_t larger = max(keys[kLarger], keys[kSmaller]);
  keys[kSmaller] = min(keys[kLarger], keys[kSmaller]);
  keys[kLarger] = larger;
}

// Sorts a lane's keys, largest first.
template <int V>
__device__ void sort_keys(uint32_t (&keys)[V]) {
  using Network = SortingNetwork<V>;
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (exchange<Network::kNetwork.pair[kIndex].larger, Network::kNetwork.pair[kIndex].smaller>(keys),
     ...);
  }
  (std::make_integer_sequence<int, Network::kPairs>());
}

// What a selection hands back: lane k's expert is the k-th choice; -1 in the other lanes.
struct Selection {
  int expert;
  bool is_certain;  // the same in all lanes
};

// The K best keys, by keys that end in their place: of the last bits of a key only the order of
// equal keys is left, lowest expert first, since place j of any lane comes before place j + 1 of
// every lane. One reduction and one vote then find the winner. Not certain where keys that met in
// the order differ in those bits alone, or are equal. `is_lossless`: the last bits of the keys of
// values are all the same, as those of bfloat16 numbers are.
template <int V>
__device__ Selection select_by_placed_keys(const uint32_t (&keys)[V], int experts_per_token,
                                           bool is_lossless) {
  constexpr uint32_t kPlace = V - 1;
  uint32_t sorted[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sorted[j] = (keys[j] & ~kPlace) | (kPlace - j);
  sort_keys(sorted);
  const int lane = lane_id();
  const unsigned lane_bit = 1u << lane;
  uint32_t chosen = 0;   // lane k: the key of the k-th choice,
  unsigned holders = 0;  // and the lanes that had it
  for (int k = 0; k < experts_per_token; ++k) {
    const uint32_t best = __reduce_max_sync(kFullWarp, sorted[0]);
    const unsigned equal = __ballot_sync(kFullWarp, sorted[0] == best);
    if (lane == k) {
      chosen = best;
      holders = equal;
    }
    if ((equal & (0u - equal)) == lane_bit) {  // the lowest of them wins
#pragma unroll
      for (int j = 0; j + 1 < V; ++j) sorted[j] = sorted[j + 1];
      sorted[V - 1] = 0;
    }
  }
  // Each choice must differ from the next, and the last from what comes after it.
  const uint32_t after_last = __reduce_max_sync(kFullWarp, sorted[0]);
  uint32_t next = __shfl_down_sync(kFullWarp, chosen, 1);
  if (lane == experts_per_token - 1) next = after_last;
  // Below V are NaN and what is no expert, which no bits tell apart here.
  const bool is_doubtful = (chosen ^ next) <= kPlace && (!is_lossless || next <= kPlace);
  const bool is_choice = lane < experts_per_token;
  Selection selection;
  selection.is_certain = !__any_sync(kFullWarp, is_choice && is_doubtful);
  selection.expert =
      is_choice ? __ffs(holders) - 1 + kWarpSize * static_cast<int>(kPlace - (chosen & kPlace))
                : -1;
  return selection;
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

// The same choice by whole keys.
template <int V>
__device__ int select_by_whole_keys(uint32_t (&keys)[V], int experts_per_token) {
  const int lane = lane_id();
  int chosen = -1;
#pragma unroll 1
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
    const int expert = lane + kWarpSize * best_j;
    const bool wins = wins_selection(best, expert);
    const int winner = __ffs(__ballot_sync(kFullWarp, wins)) - 1;
    const int won = __shfl_sync(kFullWarp, expert, winner);
    if (lane == k) chosen = won;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (wins && j == best_j) keys[j] = kNoKey;
    }
  }
  return chosen;
}

// The experts of the K best keys in the order of top-k: lane k < K gets the k-th, other lanes -1.
// Spends the keys.
template <int V>
__device__ int select_experts(uint32_t (&keys)[V], int experts_per_token, bool is_lossless) {
  const Selection selection = select_by_placed_keys(keys, experts_per_token, is_lossless);
  if (selection.is_certain) return selection.expert;
  return select_by_whole_keys(keys, experts_per_token);
}

}  // namespace dropless::cuda
