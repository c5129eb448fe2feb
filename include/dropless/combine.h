// Moving rows between token order and expert order: permute (gather), combine (weighted sum), their
// gradients, and per-expert column sums (bias gradients). Sums are fp32 and rounded once.
#pragma once

#include "dropless/executor.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

// rows[r] = x[slot_of_row[r] / K]; rows whose slot is -1 are 0.
struct PermuteArgs {
  ConstTensor x;            // [T, H] float32 | bfloat16
  ConstTensor slot_of_row;  // [M] int32
  int64_t experts_per_token = 1;
  Tensor rows;              // [M, H] dtype of x
  ConstTensor row_of_slot;  // [T, K] int32, optional: the inverse of slot_of_row, so that a GPU
                            // reads x once
};

// out[t] = sum over k of weights[t,k] * rows[row_of_slot[t,k]], in k order; slots without a row add
// 0 and their weight is not read. Without weights every weight is 1 (the gradient of permute).
struct CombineArgs {
  ConstTensor rows;         // [M, H] float32 | bfloat16
  ConstTensor row_of_slot;  // [T, K] int32
  ConstTensor weights;      // [T, K] float32, optional
  Tensor out;               // [T, H] float32 | bfloat16
};

// Gradients of combine: d_rows[r] = weights[slot] * dy[slot / K], and
// d_weights[t,k] = dot(dy[t], rows[row_of_slot[t,k]]), 0 where there is no row.
struct CombineBackwardArgs {
  ConstTensor dy;           // [T, H] float32 | bfloat16
  ConstTensor rows;         // [M, H]
  ConstTensor row_of_slot;  // [T, K] int32
  ConstTensor slot_of_row;  // [M] int32
  ConstTensor weights;      // [T, K] float32
  Tensor d_rows;            // [M, H] dtype of rows; 0 where the slot is -1
  Tensor d_weights;         // [T, K] float32
};

// out[e, p] = sum over the rows r of expert e of weight(r) * x[index(r), p]: bias gradients.
// index(r) is r, or slot_of_row[r] / K when gather is set; weight(r) is weights[slot_of_row[r]]
// or 1.
struct GroupSumArgs {
  ConstTensor x;            // [M or T, P, N] float32 | bfloat16
  ConstTensor slot_of_row;  // [M] int32, needed by gather or weights
  ConstTensor weights;      // [T, K] float32, optional
  ConstTensor offsets;      // [E+1] int32
  bool gather = false;
  int64_t experts_per_token = 1;
  Tensor out;  // [E, P, N] float32; exactly 0 for an empty expert
};

Status check(const PermuteArgs& args);
Status check(const CombineArgs& args);
Status check(const CombineBackwardArgs& args);
Status check(const GroupSumArgs& args);

namespace reference {
Status permute(const PermuteArgs& args);
Status combine(const CombineArgs& args);
Status combine_backward(const CombineBackwardArgs& args);
Status group_sum(const GroupSumArgs& args);
}  // namespace reference

namespace cpu {
Status permute(const PermuteArgs& args, Executor& executor);
Status combine(const CombineArgs& args, Executor& executor);
Status combine_backward(const CombineBackwardArgs& args, Executor& executor);
Status group_sum(const GroupSumArgs& args, Executor& executor);
}  // namespace cpu

}  // namespace dropless
