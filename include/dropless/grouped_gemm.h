// Matrix products over ragged groups of rows: rows times their expert's matrix, and the gradient to
// the matrices, where the groups lie on the contraction.
//
// Group e owns rows offsets[e] .. offsets[e+1]. offsets[0] may be positive (a device that owns only
// some of the experts). Rows outside [offsets[0], offsets[E]) of every output are exactly 0, and
// those rows of the inputs are never read. Accumulation is fp32. Any sizes >= 0.
#pragma once

#include "dropless/executor.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

// out[r] = lhs[r] @ rhs[e(r)] (+ bias[e(r)]).
// FP8 operands come with scales per 128 elements of the contraction: lhs 1x128, rhs 128x128.
struct GroupedGemmArgs {
  ConstTensor lhs;        // [M, Kc] float32 | bfloat16 | float8
  ConstTensor lhs_scale;  // [M, ceil(Kc/128)] float32, FP8 only
  ConstTensor rhs;        // [E, Kc, N], or [E, N, Kc] if rhs_transposed; dtype of lhs
  ConstTensor rhs_scale;  // the same two axes in blocks of 128, in rhs's own order; FP8 only
  ConstTensor bias;       // [E, N] float32, optional
  ConstTensor offsets;    // [E+1] int32
  bool rhs_transposed = false;
  Tensor out;  // [M, N] float32 | bfloat16
};

enum class Gather : int32_t { kNone = 0, kLhs = 1, kRhs = 2 };

// dw[p][e] = sum over the rows r of expert e of outer(x[index(r)], dy[index(r), p]).
// The gathered side reads row slot_of_row[r] / K; the other one reads row r.
// An empty expert's gradient is exactly 0 (or unchanged, when accumulating).
//
// An FP8 operand that is not gathered may come quantised, as expert_down_backward leaves it:
// B = M / 128 + E blocks of 128 rows of one expert, block offsets[e] / 128 + e being the first of
// expert e; in a block [planes, C, 128] codes in the order that the kernels read, C being the
// columns rounded up to 128. The other operand is gathered then.
struct GroupedWgradArgs {
  ConstTensor x;            // [M or T, Kc] float32 | bfloat16; or [B, 1, C, 128] float8
  ConstTensor x_scale;      // [B, 1, C] float32, only if x is float8
  ConstTensor dy;           // [M or T, P, N] dtype of x, P in {1, 2}; or [B, P, C, 128] float8
  ConstTensor dy_scale;     // [B, P, C] float32, only if dy is float8
  ConstTensor slot_of_row;  // [M] int32, needed by gather
  ConstTensor offsets;      // [E+1] int32
  Gather gather = Gather::kNone;
  int64_t experts_per_token = 1;
  // FP8: both operands are quantised in blocks of 128 rows x 1 column, counted from each expert's
  // first row, and the product is accumulated block by block.
  bool fp8 = false;
  ScaleRounding scale_rounding = ScaleRounding::kFp32;
  bool accumulate = false;  // add to dw instead of overwriting it
  Tensor dw[2];             // P arrays [E, Kc, N] float32 | bfloat16
};

Status check(const GroupedGemmArgs& args);
Status check(const GroupedWgradArgs& args);

namespace reference {
Status grouped_gemm(const GroupedGemmArgs& args);
Status grouped_wgrad(const GroupedWgradArgs& args);
}  // namespace reference

namespace cpu {
Status grouped_gemm(const GroupedGemmArgs& args, Executor& executor);
Status grouped_wgrad(const GroupedWgradArgs& args, Executor& executor);
}  // namespace cpu

}  // namespace dropless
