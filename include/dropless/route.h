// Router: from logits to chosen experts, combine weights and the statistics that balance losses
// need.
#pragma once

#include "dropless/executor.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

enum class RouterScore : int32_t { kSoftmax = 0, kSigmoid = 1 };

struct RouterOptions {
  RouterScore score = RouterScore::kSoftmax;
  // true: scores of all E experts first, then top-k of (scores + selection bias).
  // false: top-k of (logits + selection bias) first, then scores of the K chosen logits alone.
  // Every family needs one or the other: DeepSeek, Qwen, OLMoE the former; Granite, gpt-oss the
  // latter.
  bool score_before_topk = true;
  bool renormalize = true;       // divide the K weights by (their sum + renormalize_eps)
  float renormalize_eps = 0.0f;  // DeepSeek-V3 adds 1e-20
  float scale = 1.0f;            // multiplies the weights last (DeepSeek's routed_scaling_factor)
};

// Dispatch plan: where each routed row lives. A slot is t*K + k, the k-th choice of token t; a row
// is a position in the expert-sorted order. Rows of one expert are contiguous and ordered by slot.
struct PlanOutputs {
  Tensor counts;       // [E] int32: assignments per expert, before any capacity limit
  Tensor offsets;      // [E+1] int32: expert e owns rows offsets[e] .. offsets[e+1]
  Tensor slot_of_row;  // [M] int32: -1 in rows at or past offsets[E]
  Tensor row_of_slot;  // [T, K] int32: -1 where the slot has no row (id < 0 or >= E, or dropped)
};

struct PlanArgs {
  ConstTensor ids;  // [T, K] int32; ids outside [0, E) take no row
  int64_t capacity =
      0;  // > 0: an expert keeps its first `capacity` slots and drops the rest; 0: none
  PlanOutputs plan;
};

// Order of top-k: larger first, equal values lowest index first, NaN after everything (-inf
// included). All arithmetic is fp32 whatever the logits' dtype.
struct RouteArgs {
  RouterOptions options;
  ConstTensor logits;          // [T, E] float32 or bfloat16
  ConstTensor selection_bias;  // [E] float32, optional: added for selection, never for weights
  ConstTensor mask;            // [T] uint8, optional: 0 marks padding, which gets ids -1, weights 0
  int64_t capacity = 0;        // as in PlanArgs

  Tensor ids;       // [T, K] int32
  Tensor weights;   // [T, K] float32
  Tensor prob_sum;  // [E] float32: sum over real tokens of softmax(logits), or of sigmoid scores
                    // divided by their sum over experts (DeepSeek-V3, eq. 17-20)
  Tensor sums;  // [2] float32: sum over real tokens of logsumexp(logits)^2 (ST-MoE z-loss), and of
                // the entropy in nats of the distribution summed in prob_sum
  Tensor counters;  // [2] int32: real tokens; non-finite logits of real tokens
  PlanOutputs plan;
};

// Gradient of `weights`, `prob_sum` and `sums` with respect to logits. The chosen ids are
// constants.
struct RouteBackwardArgs {
  RouterOptions options;
  ConstTensor logits;      // [T, E] as in the forward call
  ConstTensor mask;        // [T] uint8, optional
  ConstTensor ids;         // [T, K] int32 as the forward call returned them
  ConstTensor d_weights;   // [T, K] float32
  ConstTensor d_prob_sum;  // [E] float32
  ConstTensor d_sums;      // [2] float32
  Tensor d_logits;         // [T, E] float32: 0 in padding rows
};

Status check(const PlanArgs& args);
Status check(const RouteArgs& args);
Status check(const RouteBackwardArgs& args);

namespace reference {
Status plan(const PlanArgs& args);
Status route(const RouteArgs& args);
Status route_backward(const RouteBackwardArgs& args);
}  // namespace reference

namespace cpu {
Status plan(const PlanArgs& args, Executor& executor);
Status route(const RouteArgs& args, Executor& executor);
Status route_backward(const RouteBackwardArgs& args, Executor& executor);
}  // namespace cpu

}  // namespace dropless
