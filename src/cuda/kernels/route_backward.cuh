// Gradient of the weights, of prob_sum and of sums with respect to the logits: one warp a token.
//
// With q the distribution that prob_sum sums (softmax p of the logits, or elementwise scores s over
// their sum) and g = d_prob_sum - d_entropy * log q:
//   softmax:      dl = p (g - sum p g)
//   elementwise:  dl = q (g - sum q g) d log(s) / dl
// plus 2 lse p d_lse_square, plus the gradient of the chosen experts' weights.
#pragma once

#include "cuda/kernels/route.cuh"
#include "cuda/kernels/router_terms.cuh"

namespace dropless::cuda {

template <class T>
struct RouteBackwardParams {
  RouterOptions options;
  const T* logits;          // [T, E]
  const int32_t* ids;       // [T, K]
  const float* d_weights;   // [T, K]
  const float* d_prob_sum;  // [E] or null
  const float* d_sums;      // [2] or null
  float* d_logits;          // [T, E] or null
  TermsOut terms;           // [T, 3, E] and [T, 6, E] or null
  int64_t tokens;
  int num_experts;
  int experts_per_token;
};

// What the weights of one token contribute: lane k's to the logit of its choice, and what softmax
// over all experts takes off every logit, times its probability.
struct ChoiceGradient {
  float of_choice = 0.0f;
  float of_all = 0.0f;
};

__device__ inline ChoiceGradient choice_gradient(const RouterOptions& options,
                                                 const WeighedChoice& weighed, float d_weight) {
  const Choice& choice = weighed.choice;
  const float mean = weighed.divisor_depends ? warp_sum(d_weight * choice.normalized) : 0.0f;
  const float d_normalized = options.scale * (d_weight - mean);
  ChoiceGradient gradient;
  if (options.score != RouterScore::kSoftmax) {
    gradient.of_choice = d_normalized * choice.slope;
    return gradient;
  }
  const float d_log_score = d_normalized * choice.normalized;
  const float total = warp_sum(d_log_score);
  if (options.score_before_topk) {
    gradient.of_choice = d_log_score;
    gradient.of_all = total;
  } else {
    gradient.of_choice = d_log_score - choice.score * total;
  }
  return gradient;
}

// Grid: ceil(T / warps). Block: full warps. Shared: [warps, E] float32.
template <class T, int V, int kThreads>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(RouteBackwardParams<T> p) {
  constexpr int kWarps = kThreads / kWarpSize;
  extern __shared__ float scattered_by_warp[];
  const int lane = lane_id();
  const int warp = threadIdx.x / kWarpSize;
  const int num_experts = p.num_experts;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (t >= p.tokens) return;
  const auto store = [&](int e, float d) {
    if (p.d_logits != nullptr) p.d_logits[t * num_experts + e] = d;
    if (p.terms.terms != nullptr) store_terms<ProductSide::kLeft>(d, t, e, num_experts, p.terms);
  };
  const int64_t slot = t * p.experts_per_token + lane;
  const int id = lane < p.experts_per_token ? p.ids[slot] : -1;
  const bool is_choice = id >= 0 && id < num_experts;
  if (!__any_sync(kFullWarp, is_choice)) {  // padding
    for (int e = lane; e < num_experts; e += kWarpSize) store(e, 0.0f);
    return;
  }

  const T* logits = p.logits + t * num_experts;
  TokenScores<V> token;
  token.load(logits, num_experts);
  const float d_weight = is_choice ? p.d_weights[slot] : 0.0f;
  const float chosen_logit = is_choice ? to_float(logits[id]) : 0.0f;

  // The choices' gradients, brought from lane k to the lane that holds the expert.
  float* scattered = scattered_by_warp + warp * num_experts;
  for (int e = lane; e < num_experts; e += kWarpSize) scattered[e] = 0.0f;
  token.compute(p.options.score, false, num_experts);
  const WeighedChoice weighed =
      weigh_choice(p.options, chosen_logit, token.largest, token.exp_sum, is_choice, kWarpSize);
  const ChoiceGradient gradient = choice_gradient(p.options, weighed, d_weight);
  __syncwarp();
  if (is_choice) scattered[id] = gradient.of_choice;
  __syncwarp();

  const bool elementwise = router::is_positive_elementwise(p.options.score);
  const float d_lse = p.d_sums == nullptr ? 0.0f : 2.0f * token.lse * p.d_sums[0];
  const float d_entropy = p.d_sums == nullptr ? 0.0f : p.d_sums[1];
  const float inverse_exp_sum = 1.0f / token.exp_sum;
  const float inverse_sum = 1.0f / token.score_sum;
  const float log_score_sum = logf(token.score_sum);
  float g[V];
  float mean = 0.0f;  // sum of q g
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    g[j] = e < num_experts && p.d_prob_sum != nullptr ? p.d_prob_sum[e] : 0.0f;
    // Where q is 0, q log q and its gradient are 0.
    if (token.score[j] > 0.0f) {
      const float log_score = elementwise ? logf(token.score[j]) : token.logit[j] - token.largest;
      g[j] -= d_entropy * (log_score - log_score_sum);
    }
    mean += token.score[j] * inverse_sum * g[j];
  }
  mean = warp_sum(mean);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    if (e >= num_experts) continue;
    const float s = token.score[j];
    float d;
    if (elementwise) {
      const float p_e = router::exp_nonpositive(token.logit[j] - token.largest) * inverse_exp_sum;
      const float slope = router::log_slope(p.options.score, token.logit[j]);
      d = s * inverse_sum * slope * (g[j] - mean) + p_e * d_lse;
    } else {
      d = s * inverse_exp_sum * (g[j] - mean - gradient.of_all + d_lse);
    }
    store(e, d + scattered[e]);
  }
}

}  // namespace dropless::cuda
