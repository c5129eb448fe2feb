// Router: from logits to chosen experts, combine weights and the statistics that balance losses
// need.
#pragma once

#include "dropless/executor.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

enum class RouterScore : int32_t {
  kSoftmax = 0,       // over experts
  kSigmoid = 1,       // of each logit, as the two below
  kSqrtSoftplus = 2,  // sqrt(log(1 + exp(z)))
  kIdentity = 3,      // the logit itself, of either sign
};

// Each token's logits z [E] become ranked values, of which top-k takes K, and weights [K] of the
// experts taken. Every family needs one combination or the other; python/dropless/_config.py says
// which.
struct RouterOptions {
  RouterScore score = RouterScore::kSoftmax;
  // true: scores of all E experts first; scores + selection bias are ranked.
  // false: logits + selection bias are ranked, and the K chosen logits alone are scored.
  bool score_before_topk = true;
  bool renormalize = true;         // divide the K weights by their sum S,
  float renormalize_eps = 0.0f;    // or by S + eps (DeepSeek-V3, 1e-20),
  float scale = 1.0f;              // multiplies the weights last (DeepSeek's routed_scaling_factor)
  bool renormalize_clamp = false;  // or, instead of S + eps, by max(S, eps) (ERNIE-4.5, 1e-12)
  // Group-limited selection: experts form num_groups equal groups of neighbours; the groups_kept
  // groups with the best scores are kept (equal scores: the lowest group first, NaN last), and the
  // ranked values of the others are replaced by -inf, or by 0 as in transformers before 5. A
  // group's score is the sum, from the largest down, of its group_score_experts best ranked values:
  // 1 is their maximum (DeepSeek-V2), 2 DeepSeek-V3's rule.
  int32_t num_groups = 1;
  int32_t groups_kept = 1;
  int32_t group_score_experts = 1;
  bool group_mask_zero = false;
};

// In forced ids, as a token's first: its experts are chosen as if no ids were given.
constexpr int32_t kRouteFreely = -2;

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
//
// Forced ids (replayed decisions, a fixed table) are the experts of each slot. A slot whose id is
// outside [0, E), or repeats an earlier one of its token, stays empty: id -1, weight 0, no row. A
// token with no expert at all is padding, like a masked one.
struct RouteArgs {
  RouterOptions options;
  ConstTensor logits;          // [T, E] float32 or bfloat16
  ConstTensor selection_bias;  // [E] float32, optional: added for selection, never for weights
  ConstTensor mask;            // [T] uint8, optional: 0 marks padding, which gets ids -1, weights 0
  ConstTensor forced_ids;      // [T, K] int32, optional: experts that are given, not chosen
  int64_t capacity = 0;        // as in PlanArgs

  Tensor ids;       // [T, K] int32
  Tensor weights;   // [T, K] float32
  Tensor prob_sum;  // [E] float32: sum over real tokens of softmax(logits), or of sigmoid or
                    // sqrt-softplus scores divided by their sum over experts (DeepSeek-V3, eq.
                    // 17-20)
  Tensor sums;  // [2] float32: sum over real tokens of logsumexp(logits)^2 (ST-MoE z-loss), and of
                // the entropy in nats of the distribution summed in prob_sum
  Tensor counters;  // [2] int32: real tokens; non-finite logits of real tokens
  PlanOutputs plan;
};

// Gradient of `weights`, `prob_sum` and `sums` with respect to logits. The chosen ids are
// constants. Tokens without an id in [0, E) are padding.
struct RouteBackwardArgs {
  RouterOptions options;
  ConstTensor logits;      // [T, E] as in the forward call
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
