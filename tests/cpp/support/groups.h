// Group sizes that break grouped kernels, and the index arrays of a routing that has them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/support/array.h"

namespace dropless::testing {

struct Groups {
  std::string name;
  std::vector<int32_t> sizes;  // [E]
  int32_t first = 0;           // offsets[0]: rows of experts that live elsewhere
  int32_t tail = 0;            // rows past the last group

  std::vector<int32_t> offsets() const {  // [E+1]
    std::vector<int32_t> result{first};
    for (const int32_t size : sizes) result.push_back(result.back() + size);
    return result;
  }
  int64_t num_experts() const { return static_cast<int64_t>(sizes.size()); }
  int64_t rows() const { return offsets().back() + tail; }  // M
};

// Small enough for the reference, wide enough to hit every edge: tiles of 8, 16, 64 and 128 rows
// and their neighbours, empty experts at either end and inside, one expert with everything, no rows
// at all.
inline std::vector<Groups> adversarial_groups() {
  return {
      {"even", {24, 24, 24}},
      {"one_expert", {53}},
      {"b1_empty_between", {8, 0, 8, 0, 5}},
      {"empty_first", {0, 0, 17, 9}},
      {"empty_last", {9, 17, 0, 0}},
      {"b9_all_to_one", {0, 0, 97, 0, 0}},
      {"singles", {1, 1, 1, 1, 1, 1, 1}},
      {"tile_neighbours", {127, 1, 128, 129, 63, 65}},
      {"small_tile_neighbours", {7, 8, 9, 15, 16, 17, 31, 33}},
      {"a1_tail", {11, 0, 23}, 0, 19},
      {"j13_first_positive", {12, 5, 0, 21}, 14, 6},
      {"a5_one_expert_and_tail", {30}, 0, 21},
      {"b4_no_rows_but_tail", {0, 0, 0}, 0, 13},
      {"no_rows", {0, 0}},
      {"b8_no_experts", {}, 0, 9},
  };
}

inline std::string group_name(const ::testing::TestParamInfo<Groups>& info) {
  return info.param.name;
}

// Index arrays of T tokens with K slots each. Rows that belong to a group have one slot each, in
// increasing order inside the group, as dropless::plan makes them; the others have slot -1.
struct RoutedRows {
  int64_t tokens;
  Array offsets;      // [E+1]
  Array slot_of_row;  // [M]
  Array row_of_slot;  // [T, K]
};

inline RoutedRows routed_rows(const Groups& groups, int64_t experts_per_token, Rng& rng) {
  const int64_t rows = groups.rows();
  RoutedRows r;
  r.tokens = ceil_div(rows, experts_per_token);
  r.offsets = ints(groups.offsets());
  r.slot_of_row = Array(DType::kI32, {rows});
  r.row_of_slot = Array(DType::kI32, {r.tokens, experts_per_token});
  std::vector<int32_t> slots(static_cast<size_t>(r.row_of_slot.size()));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), rng);
  const std::vector<int32_t> offsets = groups.offsets();
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    std::sort(slots.begin() + offsets[e], slots.begin() + offsets[e + 1]);
    for (int32_t row = offsets[e]; row < offsets[e + 1]; ++row) {
      const int32_t slot = slots[static_cast<size_t>(row)];
      r.slot_of_row.as<int32_t>()[row] = slot;
      r.row_of_slot.as<int32_t>()[slot] = row;
    }
  }
  return r;
}

// Fills the rows of `x` (first axis) that `used` names with N(0,1) and leaves the others poisoned
// (NaN).
inline void fill_rows(Array& x, Rng& rng, const std::vector<bool>& used) {
  std::normal_distribution<double> normal(0.0, 1.0);
  const int64_t width = x.dim(0) == 0 ? 0 : x.size() / x.dim(0);
  for (int64_t r = 0; r < x.dim(0); ++r) {
    for (int64_t i = 0; used[r] && i < width; ++i) x.set(r * width + i, normal(rng));
  }
}

// Rows of the groups.
inline std::vector<bool> used_rows(const Groups& groups) {
  std::vector<bool> used(groups.rows(), false);
  const std::vector<int32_t> offsets = groups.offsets();
  for (int32_t r = offsets.front(); r < offsets.back(); ++r) used[r] = true;
  return used;
}

// Tokens that have a slot in some group.
inline std::vector<bool> used_tokens(const RoutedRows& routing) {
  const int64_t per_token = routing.row_of_slot.dim(1);
  std::vector<bool> used(routing.tokens, false);
  for (int64_t slot = 0; slot < routing.row_of_slot.size(); ++slot) {
    if (routing.row_of_slot.as<int32_t>()[slot] >= 0) used[slot / per_token] = true;
  }
  return used;
}

// Scales of unit-scale FP8 operands: uniform in [0.5, 1.5), the rows that are not used poisoned.
inline Array scales(Rng& rng, std::vector<int64_t> dims, const std::vector<bool>& used = {}) {
  Array s(DType::kF32, std::move(dims));
  std::uniform_real_distribution<double> uniform(0.5, 1.5);
  const int64_t width = s.dim(0) == 0 ? 0 : s.size() / s.dim(0);
  for (int64_t i = 0; i < s.size(); ++i) {
    if (used.empty() || used[i / width]) s.set(i, uniform(rng));
  }
  return s;
}

}  // namespace dropless::testing
