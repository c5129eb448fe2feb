#include "dropless/route.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/element.h"
#include "core/exception_status.h"
#include "core/router_math.h"

namespace dropless::reference {
namespace {

using Row = std::vector<double>;

bool is_real(const ConstTensor& mask /* [T] */, int64_t t) {
  return !mask.given() || mask.as<uint8_t>()[t] != 0;
}

Row logits_of(const ConstTensor& logits /* [T, E] */, int64_t t) {
  const int64_t num_experts = logits.dims[1];
  Row z(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) z[e] = load(logits, t * num_experts + e);
  return z;
}

// NaN if any is NaN.
double max_of(const Row& z) {
  double largest = -INFINITY;
  for (const double v : z) largest = std::isnan(v) || v > largest ? v : largest;
  return largest;
}

double log_sum_exp(const Row& z) {
  const double largest = max_of(z);
  if (std::isinf(largest)) return largest;
  double sum = 0;
  for (const double v : z) sum += std::exp(v - largest);
  return largest + std::log(sum);
}

// All NaN if any logit is NaN or +inf, or if all are -inf.
Row softmax(const Row& z) {
  const double largest = max_of(z);
  Row s;
  double sum = 0;
  for (const double v : z) {
    s.push_back(std::exp(v - largest));
    sum += s.back();
  }
  for (double& v : s) v /= sum;
  return s;
}

Row sigmoid(const Row& z) {
  Row s(z.size());
  for (size_t i = 0; i < z.size(); ++i) s[i] = 1.0 / (1.0 + std::exp(-z[i]));
  return s;
}

Row log_sigmoid(const Row& z) {
  Row s(z.size());
  for (size_t i = 0; i < z.size(); ++i) {
    s[i] = std::min(z[i], 0.0) - std::log1p(std::exp(-std::abs(z[i])));
  }
  return s;
}

double sum_of(const Row& v) { return std::accumulate(v.begin(), v.end(), 0.0); }

double dot(const Row& a, const Row& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// The distribution over all experts that prob_sum and the entropy are about. Sigmoids over their
// sum are the softmax of their logarithms, which exists where every sigmoid underflows.
Row distribution(RouterScore score, const Row& z) {
  return softmax(score == RouterScore::kSoftmax ? z : log_sigmoid(z));
}

double entropy(const Row& q) {
  double sum = 0;
  for (const double v : q) sum -= v == 0 ? 0 : v * std::log(v);
  return sum;
}

std::vector<int64_t> top_k(const RouteArgs& args, int64_t t) {
  const int64_t num_experts = args.logits.dims[1];
  std::vector<float> logits(num_experts), keys(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) {
    logits[e] = static_cast<float>(load(args.logits, t * num_experts + e));
  }
  router::selection_keys(args.options, logits.data(), args.selection_bias.as<float>(), num_experts,
                         keys.data());
  std::vector<int64_t> order(num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return router::ranks_before(keys[a], a, keys[b], b); });
  order.resize(args.ids.dims[1]);
  return order;
}

Row pick(const Row& z /* [E] */, const std::vector<int64_t>& ids /* [K] */) {
  Row chosen;
  for (const int64_t id : ids) chosen.push_back(z[id]);
  return chosen;
}

// Scores of the chosen experts before renormalisation and scale.
Row chosen_scores(const RouterOptions& options, const Row& z, const std::vector<int64_t>& ids) {
  if (options.score == RouterScore::kSigmoid) return sigmoid(pick(z, ids));
  return options.score_before_topk ? pick(softmax(z), ids) : softmax(pick(z, ids));
}

// Adds to dz [E] the gradient of the K weights.
void add_weights_gradient(const RouterOptions& options, const Row& z,
                          const std::vector<int64_t>& ids, const Row& d_weights, Row& dz) {
  const Row s = chosen_scores(options, z, ids);
  Row ds(ids.size());
  const double denominator = sum_of(s) + options.renormalize_eps;
  const double mean_gradient = dot(d_weights, s) / denominator;
  for (size_t k = 0; k < ids.size(); ++k) {
    ds[k] = options.renormalize ? (d_weights[k] - mean_gradient) / denominator : d_weights[k];
    ds[k] *= options.scale;
  }
  if (options.score == RouterScore::kSigmoid) {
    for (size_t k = 0; k < ids.size(); ++k) dz[ids[k]] += ds[k] * s[k] * (1 - s[k]);
    return;
  }
  // softmax: dz_i = s_i * (ds_i - sum_j ds_j s_j); experts that were not chosen have ds = 0.
  const double mean = dot(ds, s);
  if (options.score_before_topk) {
    const Row all = softmax(z);
    for (size_t e = 0; e < z.size(); ++e) dz[e] -= all[e] * mean;
    for (size_t k = 0; k < ids.size(); ++k) dz[ids[k]] += s[k] * ds[k];
  } else {
    for (size_t k = 0; k < ids.size(); ++k) dz[ids[k]] += s[k] * (ds[k] - mean);
  }
}

// Adds to dz [E] the gradient of one token's terms in prob_sum and sums.
void add_statistics_gradient(RouterScore score, const Row& z, const float* d_prob_sum /* [E] */,
                             const float* d_sums /* [2] */, Row& dz) {
  const Row q = distribution(score, z);
  const Row probabilities = softmax(z);
  const Row sigmoids = sigmoid(z);
  const double lse = log_sum_exp(z);
  Row dq(z.size());
  for (size_t e = 0; e < z.size(); ++e) {
    // d(entropy)/dq = -(log q + 1); the constant vanishes below, since q sums to 1. At q = 0 the
    // limit of q * log q is 0.
    dq[e] = d_prob_sum[e] - (q[e] == 0 ? 0 : d_sums[1] * std::log(q[e]));
  }
  const double mean = dot(dq, q);
  for (size_t e = 0; e < z.size(); ++e) {
    const double inner = score == RouterScore::kSoftmax ? 1.0 : 1.0 - sigmoids[e];
    dz[e] += q[e] * (dq[e] - mean) * inner;
    dz[e] += d_sums[0] * 2 * lse * probabilities[e];
  }
}

}  // namespace

Status route(const RouteArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const RouterOptions& options = args.options;
  const int64_t tokens = args.ids.dims[0];
  const int64_t per_token = args.ids.dims[1];
  const int64_t num_experts = args.logits.dims[1];
  Row prob_sum(num_experts, 0.0);
  double lse_squares = 0, entropies = 0;
  int32_t real_tokens = 0, non_finite = 0;

  for (int64_t t = 0; t < tokens; ++t) {
    int32_t* ids = args.ids.as<int32_t>() + t * per_token;
    float* weights = args.weights.as<float>() + t * per_token;
    if (!is_real(args.mask, t)) {
      std::fill_n(ids, per_token, -1);
      std::fill_n(weights, per_token, 0.0f);
      continue;
    }
    const Row z = logits_of(args.logits, t);
    const std::vector<int64_t> chosen = top_k(args, t);
    const Row s = chosen_scores(options, z, chosen);
    const double denominator = options.renormalize ? sum_of(s) + options.renormalize_eps : 1.0;
    for (int64_t k = 0; k < per_token; ++k) {
      ids[k] = static_cast<int32_t>(chosen[k]);
      weights[k] = static_cast<float>(s[k] / denominator * options.scale);
    }
    const Row q = distribution(options.score, z);
    for (int64_t e = 0; e < num_experts; ++e) {
      prob_sum[e] += q[e];
      non_finite += std::isfinite(z[e]) ? 0 : 1;
    }
    const double lse = log_sum_exp(z);
    lse_squares += lse * lse;
    entropies += entropy(q);
    ++real_tokens;
  }

  for (int64_t e = 0; e < num_experts; ++e) store(args.prob_sum, e, prob_sum[e]);
  store(args.sums, 0, lse_squares);
  store(args.sums, 1, entropies);
  args.counters.as<int32_t>()[0] = real_tokens;
  args.counters.as<int32_t>()[1] = non_finite;
  return plan(PlanArgs{args.ids, args.capacity, args.plan});
} catch (...) {
  return exception_status("route");
}

Status route_backward(const RouteBackwardArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.ids.dims[0];
  const int64_t per_token = args.ids.dims[1];
  const int64_t num_experts = args.logits.dims[1];
  for (int64_t t = 0; t < tokens; ++t) {
    Row dz(num_experts, 0.0);
    if (is_real(args.mask, t)) {
      std::vector<int64_t> ids;
      Row d_weights;
      for (int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
        const int64_t id = args.ids.as<int32_t>()[slot];
        if (id < 0 || id >= num_experts) continue;
        ids.push_back(id);
        d_weights.push_back(args.d_weights.as<float>()[slot]);
      }
      const Row z = logits_of(args.logits, t);
      if (!ids.empty()) add_weights_gradient(args.options, z, ids, d_weights, dz);
      add_statistics_gradient(args.options.score, z, args.d_prob_sum.as<float>(),
                              args.d_sums.as<float>(), dz);
    }
    for (int64_t e = 0; e < num_experts; ++e) store(args.d_logits, t * num_experts + e, dz[e]);
  }
  return Status();
} catch (...) {
  return exception_status("route_backward");
}

}  // namespace dropless::reference
