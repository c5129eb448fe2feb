// Positions in dense arrays. Everything that multiplies is 64-bit: T*K*H passes 2^31 in real
// models.
#pragma once

#include <cstdint>

#include "dropless/types.h"

namespace dropless {

// Element (row, col) of [rows, width].
constexpr int64_t row_index(int64_t row, int64_t col, int64_t width) { return row * width + col; }

// Element (e, i, j) of [E, rows, cols].
constexpr int64_t matrix_index(int64_t e, int64_t i, int64_t j, int64_t rows, int64_t cols) {
  return (e * rows + i) * cols + j;
}

// The 1x128 scale that covers (row, col) of [rows, width].
constexpr int64_t row_scale_index(int64_t row, int64_t col, int64_t width) {
  return row * ceil_div(width, kScaleBlock) + col / kScaleBlock;
}

// The 128x128 scale that covers (e, i, j) of [E, rows, cols].
constexpr int64_t matrix_scale_index(int64_t e, int64_t i, int64_t j, int64_t rows, int64_t cols) {
  return matrix_index(e, i / kScaleBlock, j / kScaleBlock, ceil_div(rows, kScaleBlock),
                      ceil_div(cols, kScaleBlock));
}

// The rows [begin, end) of one expert.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Rows of expert e by offsets [E+1], cut to the `rows` that exist: whatever the offsets hold, no
// index leaves the arrays.
inline RowRange rows_of_expert(const int32_t* offsets, int64_t e, int64_t rows) {
  const auto clamp = [rows](int64_t r) { return r < 0 ? 0 : (r > rows ? rows : r); };
  const int64_t begin = clamp(offsets[e]);
  const int64_t end = clamp(offsets[e + 1]);
  return {begin, end > begin ? end : begin};
}

// Rows that belong to some expert: [offsets[0], offsets[E]).
inline RowRange rows_of_all_experts(const int32_t* offsets, int64_t num_experts, int64_t rows) {
  if (num_experts == 0) return {0, 0};
  const int64_t begin = rows_of_expert(offsets, 0, rows).begin;
  const int64_t end = rows_of_expert(offsets, num_experts - 1, rows).end;
  return {begin, end > begin ? end : begin};
}

// Token of a slot t*K + k, or -1 if the slot is "none" or not one of T*K.
constexpr int64_t token_of_slot(int64_t slot, int64_t experts_per_token, int64_t tokens) {
  if (slot < 0 || slot >= tokens * experts_per_token) return -1;
  return slot / experts_per_token;
}

}  // namespace dropless
