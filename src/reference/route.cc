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

bool is_masked(const ConstTensor& mask /* [T] */, int64_t t) {
  return mask.given() && mask.as<uint8_t>()[t] == 0;
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

double log_sigmoid(double z) { return std::min(z, 0.0) - std::log1p(std::exp(-std::abs(z))); }

double log_softplus(double z) {
  // log(1 + e) = e (1 - e/2 + ...): below -40 the bracket is 1 in double.
  if (z < -40) return z;
  return std::log(std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))));
}

// Of a positive score of one logit.
double log_score(RouterScore score, double z) {
  return score == RouterScore::kSigmoid ? log_sigmoid(z) : 0.5 * log_softplus(z);
}

// Its derivative.
double log_score_slope(RouterScore score, double z) {
  if (score == RouterScore::kSigmoid) return std::exp(log_sigmoid(-z));
  return z < -40 ? 0.5 : 0.5 * std::exp(log_sigmoid(z) - log_softplus(z));
}

Row log_scores(RouterScore score, const Row& z) {
  Row out;
  for (const double v : z) out.push_back(log_score(score, v));
  return out;
}

double sum_of(const Row& v) { return std::accumulate(v.begin(), v.end(), 0.0); }

double dot(const Row& a, const Row& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// The distribution over all experts that prob_sum and the entropy are about. Positive scores over
// their sum are the softmax of their logarithms, which exists where every score underflows.
Row distribution(RouterScore score, const Row& z) {
  return softmax(router::is_positive_elementwise(score) ? log_scores(score, z) : z);
}

double entropy(const Row& q) {
  double sum = 0;
  for (const double v : q) sum -= v == 0 ? 0 : v * std::log(v);
  return sum;
}

// One slot with its expert.
struct Choice {
  int64_t k;
  int64_t id;
};

std::vector<Choice> top_k(const RouteArgs& args, int64_t t) {
  const int64_t num_experts = args.logits.dims[1];
  std::vector<float> logits(num_experts), keys(num_experts);
  std::vector<float> group_scores(args.options.num_groups);
  for (int64_t e = 0; e < num_experts; ++e) {
    logits[e] = static_cast<float>(load(args.logits, t * num_experts + e));
  }
  router::selection_keys(args.options, logits.data(), args.selection_bias.as<float>(), num_experts,
                         keys.data(), group_scores.data());
  std::vector<int64_t> order(num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return router::ranks_before(keys[a], a, keys[b], b); });
  std::vector<Choice> choices;
  for (int64_t k = 0; k < args.ids.dims[1]; ++k) choices.push_back({k, order[k]});
  return choices;
}

// The slots of ids [K] that hold an expert, each expert once.
std::vector<Choice> valid_choices(const int32_t* ids, int64_t per_token, int64_t num_experts) {
  std::vector<Choice> choices;
  for (int64_t k = 0; k < per_token; ++k) {
    const bool repeats = std::find(ids, ids + k, ids[k]) != ids + k;
    if (ids[k] >= 0 && ids[k] < num_experts && !repeats) choices.push_back({k, ids[k]});
  }
  return choices;
}

// None for padding.
std::vector<Choice> choose(const RouteArgs& args, int64_t t) {
  if (is_masked(args.mask, t)) return {};
  const int64_t per_token = args.ids.dims[1];
  if (args.forced_ids.given() && per_token > 0) {
    const int32_t* forced = args.forced_ids.as<int32_t>() + t * per_token;
    if (forced[0] != kRouteFreely) return valid_choices(forced, per_token, args.logits.dims[1]);
  }
  return top_k(args, t);
}

// The weights of a token's choices, before `scale`.
struct Weights {
  Row scores;
  Row normalized;
  double denominator;   // normalized = scores / denominator
  bool depends_on_sum;  // the denominator does
};

Weights weigh(const RouterOptions& options, const Row& z, const std::vector<Choice>& choices) {
  Weights w = {{}, {}, 1.0, false};
  Row chosen;
  for (const Choice& c : choices) chosen.push_back(z[c.id]);
  if (options.score == RouterScore::kSoftmax) {
    const Row all = softmax(options.score_before_topk ? z : chosen);
    for (size_t i = 0; i < choices.size(); ++i) {
      w.scores.push_back(all[options.score_before_topk ? choices[i].id : i]);
    }
  } else if (options.score == RouterScore::kIdentity) {
    w.scores = chosen;
  } else {
    for (const double v : chosen) w.scores.push_back(std::exp(log_score(options.score, v)));
  }
  if (options.renormalize) {
    const double sum = sum_of(w.scores);
    const double eps = options.renormalize_eps;
    w.depends_on_sum = !options.renormalize_clamp || !(sum < eps);
    w.denominator = !options.renormalize_clamp ? sum + eps : w.depends_on_sum ? sum : eps;
    // Scores that underflow even here keep their ratios.
    if (w.denominator == 0 && options.score != RouterScore::kIdentity) {
      const bool elementwise = router::is_positive_elementwise(options.score);
      w.normalized = softmax(elementwise ? log_scores(options.score, chosen) : chosen);
      return w;
    }
  }
  for (const double s : w.scores) w.normalized.push_back(s / w.denominator);
  return w;
}

// Adds to dz [E] the gradient of the weights of the chosen experts.
void add_weights_gradient(const RouterOptions& options, const Row& z,
                          const std::vector<Choice>& choices, const Row& d_weights, Row& dz) {
  const Weights w = weigh(options, z, choices);
  const double mean = w.depends_on_sum ? dot(d_weights, w.normalized) : 0.0;
  double total = 0;  // sum of d_score * score
  for (size_t i = 0; i < choices.size(); ++i) {
    total += options.scale * (d_weights[i] - mean) * w.normalized[i];
  }
  for (size_t i = 0; i < choices.size(); ++i) {
    const int64_t id = choices[i].id;
    const double d_normalized = options.scale * (d_weights[i] - mean);
    const double d_log_score = d_normalized * w.normalized[i];
    if (options.score == RouterScore::kIdentity) {
      dz[id] += d_normalized / w.denominator;
    } else if (options.score != RouterScore::kSoftmax) {
      dz[id] += d_log_score * log_score_slope(options.score, z[id]);
    } else {
      // softmax: dz_i = s_i * (ds_i - sum_j ds_j s_j); experts that were not chosen have ds = 0.
      dz[id] += d_log_score - (options.score_before_topk ? 0 : w.scores[i] * total);
    }
  }
  if (options.score == RouterScore::kSoftmax && options.score_before_topk) {
    const Row all = softmax(z);
    for (size_t e = 0; e < z.size(); ++e) dz[e] -= all[e] * total;
  }
}

// Adds to dz [E] the gradient of one token's terms in prob_sum and sums.
void add_statistics_gradient(RouterScore score, const Row& z, const float* d_prob_sum /* [E] */,
                             const float* d_sums /* [2] */, Row& dz) {
  const Row q = distribution(score, z);
  const Row probabilities = softmax(z);
  const double lse = log_sum_exp(z);
  Row dq(z.size());
  for (size_t e = 0; e < z.size(); ++e) {
    // d(entropy)/dq = -(log q + 1); the constant vanishes below, since q sums to 1. At q = 0 the
    // limit of q * log q is 0.
    dq[e] = d_prob_sum[e] - (q[e] == 0 ? 0 : d_sums[1] * std::log(q[e]));
  }
  const double mean = dot(dq, q);
  for (size_t e = 0; e < z.size(); ++e) {
    const bool positive = router::is_positive_elementwise(score);
    const double inner = positive ? log_score_slope(score, z[e]) : 1.0;
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
    std::fill_n(ids, per_token, -1);
    std::fill_n(weights, per_token, 0.0f);
    const std::vector<Choice> choices = choose(args, t);
    if (choices.empty()) continue;
    const Row z = logits_of(args.logits, t);
    const Row normalized = weigh(options, z, choices).normalized;
    for (size_t i = 0; i < choices.size(); ++i) {
      ids[choices[i].k] = static_cast<int32_t>(choices[i].id);
      weights[choices[i].k] = static_cast<float>(normalized[i] * options.scale);
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
    const std::vector<Choice> choices =
        valid_choices(args.ids.as<int32_t>() + t * per_token, per_token, num_experts);
    if (!choices.empty()) {
      Row d_weights;
      for (const Choice& c : choices) {
        d_weights.push_back(args.d_weights.as<float>()[t * per_token + c.k]);
      }
      const Row z = logits_of(args.logits, t);
      add_weights_gradient(args.options, z, choices, d_weights, dz);
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
