// The feed-forward of the experts, each GEMM with what is fused around it.
//
// forward
//   expert_up             h = x[token] @ {gate, up} (+ biases); A = act(h_gate) * h_up
//                         (ActivationOptions says more; experts without a gate have one matrix)
//   grouped_gemm          O = A @ down (+ bias)
//   combine               y = sum over k of p * O
// backward
//   expert_down_backward  dA' = dy[token] @ down^T; dh from p * dA'; p * A; dp = rowsum(dA' * A)
//   expert_up_backward    dx_rows = dh_gate @ gate^T + dh_up @ up^T
//   grouped_wgrad         the weight gradients
//
// The routing weight p multiplies A, never dy. A is computed from h rounded to float32 for float32
// operands, else to bfloat16, in forward and in backward alike; only where h is stored in float8
// does the backward pass know no more of it than that. Row conventions (offsets, zero tails) are
// those of grouped_gemm.h.
#pragma once

#include <limits>

#include "dropless/executor.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

enum class ActivationKind : int32_t {
  kSilu = 0,         // z * sigmoid(z)
  kGelu = 1,         // z * Phi(z), by erf
  kGeluTanh = 2,     // the tanh approximation of Hendrycks & Gimpel (arXiv 1606.08415)
  kRelu = 3,         // max(z, 0); slope 0 at 0
  kReluSquared = 4,  // max(z, 0)^2 (Primer, arXiv 2109.08668)
};

// Without a limit a pre-activation passes as it is.
constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// A = act(g) * (u + up_offset), with g = min(h_gate, gate_limit) and u = h_up cut to
// [-up_limit, up_limit]; A = act(g) if not gated. Where a pre-activation is beyond its limit its
// gradient is 0; at the limit it is not (as in PyTorch's clamp). NaN passes both.
struct ActivationOptions {
  ActivationKind kind = ActivationKind::kSilu;
  bool gated = true;   // else there is no up matrix, and P = 1 below
  float slope = 1.0f;  // of the sigmoid: z * sigmoid(slope * z); kSilu only (gpt-oss: 1.702)
  float gate_limit = kNoLimit;
  float up_limit = kNoLimit;  // gated only, as up_offset
  float up_offset = 0.0f;

  // Pre-activations of a unit of A: gate and up, or one.
  int64_t parts() const { return gated ? 2 : 1; }
  // Nothing but a kind, gated: what most models have.
  bool plain() const {
    return gated && slope == 1.0f && gate_limit == kNoLimit && up_limit == kNoLimit &&
           up_offset == 0.0f;
  }
};

struct ExpertUpArgs {
  ConstTensor x;        // [T, H] float32 | bfloat16 | float8
  ConstTensor x_scale;  // [T, ceil(H/128)] float32, FP8 only
  ConstTensor gate;     // [E, H, I], or [E, I, H] if weights_transposed; dtype of x
  ConstTensor up;       // as gate; gated only, as all of up
  ConstTensor
      gate_scale;        // the two matrix axes of gate in blocks of 128, in its own order; FP8 only
  ConstTensor up_scale;  // as gate_scale
  ConstTensor gate_bias;    // [E, I] float32, optional
  ConstTensor up_bias;      // [E, I] float32, optional
  ConstTensor offsets;      // [E+1] int32
  ConstTensor slot_of_row;  // [M] int32
  int64_t experts_per_token = 1;
  bool weights_transposed = false;
  ActivationOptions activation;
  ScaleRounding scale_rounding = ScaleRounding::kFp32;

  // Pre-activations, gate first, P = activation.parts(); optional (not needed without a gradient).
  // float32 for float32 operands, else bfloat16, or float8 with 1x128 scales along I. A is always
  // computed from h as rounded to float32 / bfloat16, even when h is stored in float8.
  Tensor h;        // [M, P, I]
  Tensor h_scale;  // [M, P, ceil(I/128)] float32, only if h is float8
  Tensor a;        // [M, I] dtype of the operands; float8 is quantised from the fp32 product
  Tensor a_scale;  // [M, ceil(I/128)] float32, only if a is float8
};

struct ExpertDownBackwardArgs {
  ConstTensor dy;           // [T, H] float32 | bfloat16 | float8
  ConstTensor dy_scale;     // [T, ceil(H/128)] float32, FP8 only
  ConstTensor down;         // [E, I, H] dtype of dy
  ConstTensor down_scale;   // [E, ceil(I/128), ceil(H/128)] float32, FP8 only
  ConstTensor down_bias;    // [E, H] float32, optional: only d_weights depends on it
  ConstTensor h;            // [M, P, I] as expert_up stored it
  ConstTensor h_scale;      // [M, P, ceil(I/128)] float32, only if h is float8
  ConstTensor weights;      // [T, K] float32 routing weights p
  ConstTensor offsets;      // [E+1] int32
  ConstTensor slot_of_row;  // [M] int32
  ActivationOptions activation;
  ScaleRounding scale_rounding = ScaleRounding::kFp32;

  Tensor dh;        // [M, P, I] float32 for float32 operands, else bfloat16
  Tensor dh_q;      // [M, P, I] float8, optional: dh quantised 1x128 along I from its fp32 value
  Tensor dh_scale;  // [M, P, ceil(I/128)] float32, with dh_q
  Tensor pa;        // [M, I] dtype of dh: p * A
  // In place of dh and pa, for grouped_wgrad's FP8 operands (grouped_gemm.h), of the values that dh
  // and pa would have. With float8 operands, gated, dh_q given.
  Tensor dh_columns;        // [B, P, C, 128] float8, C = ceil(I/128) * 128
  Tensor dh_columns_scale;  // [B, P, C] float32
  Tensor pa_columns;        // [B, 1, C, 128] float8
  Tensor pa_columns_scale;  // [B, 1, C] float32
  Tensor
      d_weights;  // [T, K] float32: rowsum(dA' * A) + dot(dy, down_bias); 0 where a slot has no row
};

struct ExpertUpBackwardArgs {
  ConstTensor dh;          // [M, P, I] float32 | bfloat16 | float8
  ConstTensor dh_scale;    // [M, P, ceil(I/128)] float32, FP8 only
  ConstTensor gate;        // [E, H, I] dtype of dh
  ConstTensor up;          // [E, H, I]; not given: P = 1
  ConstTensor gate_scale;  // [E, ceil(H/128), ceil(I/128)] float32, FP8 only
  ConstTensor up_scale;    // as gate_scale
  ConstTensor offsets;     // [E+1] int32
  Tensor dx_rows;          // [M, H] float32 for float32 operands, else bfloat16
};

Status check(const ExpertUpArgs& args);
Status check(const ExpertDownBackwardArgs& args);
Status check(const ExpertUpBackwardArgs& args);

namespace reference {
Status expert_up(const ExpertUpArgs& args);
Status expert_down_backward(const ExpertDownBackwardArgs& args);
Status expert_up_backward(const ExpertUpBackwardArgs& args);
}  // namespace reference

namespace cpu {
Status expert_up(const ExpertUpArgs& args, Executor& executor);
Status expert_down_backward(const ExpertDownBackwardArgs& args, Executor& executor);
Status expert_up_backward(const ExpertUpBackwardArgs& args, Executor& executor);
}  // namespace cpu

}  // namespace dropless
