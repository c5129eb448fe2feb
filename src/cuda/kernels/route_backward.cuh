// Gradient of the weights, of prob_sum and of sums with respect to the logits: one warp a token.
//
// With q the distribution that prob_sum sums (softmax p of the logits, or sigmoid scores s over
// their sum Z) and g = d_prob_sum - d_entropy * log q:
//   softmax:  dl = p (g - sum p g)
//   sigmoid:  dl = s (1 - s) (g - sum q g) / Z
// plus 2 lse p d_lse_square, plus the gradient of the chosen experts' weights.
#pragma once

#include "cuda/kernels/route.cuh"

namespace dropless::cuda {

template <class T>
struct RouteBackwardParams {
  RouterOptions options;
  const T* logits;          // [T, E]
  const uint8_t* mask;      // [T] or null
  const int32_t* ids;       // [T, K]
  const float* d_weights;   // [T, K]
  const float* d_prob_sum;  // [E]
  const float* d_sums;      // [2]
  float* d_logits;          // [T, E]
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

__device__ inline ChoiceGradient choice_gradient(const RouterOptions& options, float score,
                                                 float d_weight, bool is_choice) {
  float d_score = d_weight * options.scale;  // weight = scale * score / (sum + eps)
  if (options.renormalize) {
    const float denominator = warp_sum(score) + options.renormalize_eps;
    const float dot = warp_sum(is_choice ? d_score * score : 0.0f);
    d_score = (d_score - dot / denominator) / denominator;
  }
  ChoiceGradient gradient;
  if (options.score == RouterScore::kSigmoid) {
    gradient.of_choice = is_choice ? d_score * score * (1.0f - score) : 0.0f;
    return gradient;
  }
  const float dot = warp_sum(is_choice ? d_score * score : 0.0f);
  if (options.score_before_topk) {
    gradient.of_choice = is_choice ? d_score * score : 0.0f;
    gradient.of_all = dot;
  } else {
    gradient.of_choice = is_choice ? score * (d_score - dot) : 0.0f;
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
  float* d_logits = p.d_logits + t * num_experts;
  if (p.mask != nullptr && p.mask[t] == 0) {
    for (int e = lane; e < num_experts; e += kWarpSize) d_logits[e] = 0.0f;
    return;
  }

  const T* logits = p.logits + t * num_experts;
  TokenScores<V> token;
  token.load(logits, num_experts);
  const int64_t slot = t * p.experts_per_token + lane;
  const int id = lane < p.experts_per_token ? p.ids[slot] : -1;
  const bool is_choice = id >= 0 && id < num_experts;
  const float d_weight = is_choice ? p.d_weights[slot] : 0.0f;
  const float chosen_logit = is_choice ? to_float(logits[id]) : 0.0f;

  // The choices' gradients, brought from lane k to the lane that holds the expert.
  float* scattered = scattered_by_warp + warp * num_experts;
  for (int e = lane; e < num_experts; e += kWarpSize) scattered[e] = 0.0f;
  token.compute(p.options.score);
  const float score =
      chosen_score(p.options, chosen_logit, token.largest, token.exp_sum, is_choice);
  const ChoiceGradient choice = choice_gradient(p.options, score, d_weight, is_choice);
  __syncwarp();
  if (is_choice) scattered[id] = choice.of_choice;
  __syncwarp();

  const bool sigmoid = p.options.score == RouterScore::kSigmoid;
  const float d_lse = 2.0f * token.lse * p.d_sums[0];
  const float d_entropy = p.d_sums[1];
  const float inverse_exp_sum = 1.0f / token.exp_sum;
  const float inverse_score_sum = 1.0f / token.score_sum;
  const float log_score_sum = logf(token.score_sum);
  float g[V];
  float mean = 0.0f;  // sum of q g
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    g[j] = e < num_experts ? p.d_prob_sum[e] : 0.0f;
    // Where q is 0, q log q and its gradient are 0.
    if (token.score[j] > 0.0f) {
      const float log_score = sigmoid ? logf(token.score[j]) : token.logit[j] - token.largest;
      g[j] -= d_entropy * (log_score - log_score_sum);
    }
    mean += token.score[j] * inverse_score_sum * g[j];
  }
  mean = warp_sum(mean);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int e = lane + kWarpSize * j;
    if (e >= num_experts) continue;
    const float s = token.score[j];
    float d;
    if (sigmoid) {
      const float p_e = router::exp_nonpositive(token.logit[j] - token.largest) * inverse_exp_sum;
      d = s * (1.0f - s) * (g[j] - mean) * inverse_score_sum + p_e * d_lse;
    } else {
      d = s * inverse_exp_sum * (g[j] - mean - choice.of_all + d_lse);
    }
    d_logits[e] = d + scattered[e];
  }
}

}  // namespace dropless::cuda
