// Row arithmetic of routing and row moving, compiled once per instruction set. Like gemm_kernel.h,
// this header defines no inline function and includes nothing that does.
#pragma once

#include <cstdint>

namespace dropless::cpu {

// Router rows are padded to a multiple of this many floats (the widest vector): logits with -inf,
// which no score, maximum or sum notices, everything else with 0.
constexpr int64_t kRowPadding = 16;

struct RouterRow {
  const float* logits;  // [n]
  int64_t n;            // padded
  float largest;        // NaN if a logit is
  float lse;            // log of the sum of exp(logits)
  float* scores;        // [n] softmax; or sigmoid, sqrt-softplus, up to a factor common to the row
  float* slopes;        // [n] d log(score) / d logit, without cancellation; not of softmax
};

// Upstream gradients of one token's statistics.
struct RouterGradient {
  const float* d_prob;  // [n]
  float d_entropy;
  float d_lse;         // of the logsumexp itself
  float d_scores_sum;  // sum over the chosen experts of d_score * score; softmax over all experts
                       // only
};

struct VectorOps {
  // out[n] = sum over k < count of weights[k] * rows[k][n], in that order. `streaming`: past the
  // caches, for results that are larger.
  void (*weighted_sum)(const void* const* rows, const float* weights, int64_t count, bool rows_bf16,
                       int64_t n, void* out, bool out_bf16, bool streaming);
  // d_row[n] = weight * dy[n]; returns the dot product of dy and row.
  float (*scale_and_dot)(const void* dy, bool dy_bf16, const void* row, bool rows_bf16,
                         float weight, int64_t n, void* d_row);
  // sum[n] += weight * x[n].
  void (*accumulate)(const void* x, bool x_bf16, float weight, int64_t n, float* sum);

  // Fills largest and lse, and returns how many of the n logits are not finite (padding included).
  int64_t (*describe)(RouterRow& row);
  // Fill scores (and slopes) from described rows. The elementwise ones return the sum of the
  // scores; where every score may underflow, the row's largest is 1 instead.
  void (*softmax)(const RouterRow& row);
  float (*sigmoid)(const RouterRow& row);
  float (*sqrt_softplus)(const RouterRow& row);
  // prob_sum[n] += q, where q is the softmax scores, or the elementwise scores over their sum;
  // returns the entropy of q.
  float (*add_softmax_statistics)(const RouterRow& row, float* prob_sum);
  float (*add_elementwise_statistics)(const RouterRow& row, float scores_sum, float* prob_sum);
  // d_logits[n] = the gradient of the statistics (for softmax: and of the chosen scores'
  // normaliser).
  void (*softmax_backward)(const RouterRow& row, const RouterGradient& gradient, float* d_logits);
  void (*elementwise_backward)(const RouterRow& row, float scores_sum,
                               const RouterGradient& gradient, float* d_logits);
};

extern const VectorOps kPortableVectorOps;
#if defined(__x86_64__)
extern const VectorOps kAvx2VectorOps;
extern const VectorOps kAvx512VectorOps;
#endif

// The widest that this processor runs.
const VectorOps& vector_ops();

}  // namespace dropless::cpu
