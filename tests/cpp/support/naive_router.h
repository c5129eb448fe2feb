// The router by its definitions, in double and without any care for speed or range.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "dropless/route.h"
#include "tests/cpp/support/routing.h"

namespace dropless::testing {

struct Naive {
  std::vector<double> weights;  // [K]
  std::vector<double> prob;     // [E]
  double lse_square = 0, entropy = 0;
};

inline double naive_score(RouterScore score, double z) {
  if (score == RouterScore::kSigmoid) return 1 / (1 + std::exp(-z));
  return score == RouterScore::kSqrtSoftplus ? std::sqrt(std::log(1 + std::exp(z))) : z;
}

// One token, by the definitions; `ids` are the chosen experts.
inline Naive naive_router(const RouterOptions& o, const std::vector<double>& z,
                          const std::vector<int>& ids) {
  const bool shares = o.score == RouterScore::kSigmoid || o.score == RouterScore::kSqrtSoftplus;
  Naive r;
  double exp_all = 0, exp_chosen = 0, score_all = 0;
  for (const double v : z) exp_all += std::exp(v), score_all += naive_score(o.score, v);
  for (const int id : ids) exp_chosen += std::exp(z[id]);
  for (const int id : ids) {
    double w = naive_score(o.score, z[id]);
    if (o.score == RouterScore::kSoftmax) {
      w = std::exp(z[id]) / (o.score_before_topk ? exp_all : exp_chosen);
    }
    r.weights.push_back(w);
  }
  if (o.renormalize) {
    double sum = 0;
    for (const double w : r.weights) sum += w;
    const double eps = o.renormalize_eps;
    for (double& w : r.weights) w /= o.renormalize_clamp ? std::max(sum, eps) : sum + eps;
  }
  for (double& w : r.weights) w *= o.scale;
  for (const double v : z) {
    const double q = shares ? naive_score(o.score, v) / score_all : std::exp(v) / exp_all;
    r.prob.push_back(q);
    r.entropy -= q * std::log(q);
  }
  r.lse_square = std::log(exp_all) * std::log(exp_all);
  return r;
}

inline std::vector<double> row_of(const Array& a, int64_t t) {
  const int64_t width = a.dim(1);
  std::vector<double> row;
  for (int64_t i = 0; i < width; ++i) row.push_back(a[t * width + i]);
  return row;
}

// K largest of `keys`, by repeated search.
inline std::vector<int> naive_top_k(std::vector<double> keys, int64_t k) {
  std::vector<int> ids;
  for (int64_t i = 0; i < k; ++i) {
    int best = 0;
    for (size_t e = 1; e < keys.size(); ++e) {
      if (keys[e] > keys[best]) best = static_cast<int>(e);
    }
    ids.push_back(best);
    keys[best] = -std::numeric_limits<double>::infinity();
  }
  return ids;
}

// The K experts of a token by the rules of RouterOptions, in double: no two values are equal.
inline std::vector<int> naive_selection(const RouterOptions& o, const std::vector<double>& z,
                                        const Array& bias, int64_t k) {
  double exp_all = 0;
  for (const double v : z) exp_all += std::exp(v);
  std::vector<double> ranked;
  for (size_t e = 0; e < z.size(); ++e) {
    double value = z[e];
    if (o.score_before_topk) {
      value =
          o.score == RouterScore::kSoftmax ? std::exp(z[e]) / exp_all : naive_score(o.score, z[e]);
    }
    ranked.push_back(value + (bias.view().given() ? bias[static_cast<int64_t>(e)] : 0.0));
  }
  const size_t size = z.size() / static_cast<size_t>(o.num_groups);
  std::vector<double> scores;
  for (size_t g = 0; g < static_cast<size_t>(o.num_groups); ++g) {
    std::vector<double> group(ranked.begin() + g * size, ranked.begin() + (g + 1) * size);
    std::sort(group.rbegin(), group.rend());
    scores.push_back(std::accumulate(group.begin(), group.begin() + o.group_score_experts, 0.0));
  }
  const std::vector<int> kept = naive_top_k(scores, o.groups_kept);
  for (size_t e = 0; e < ranked.size(); ++e) {
    const bool is_kept =
        std::find(kept.begin(), kept.end(), static_cast<int>(e / size)) != kept.end();
    if (!is_kept) ranked[e] = o.group_mask_zero ? 0.0 : -std::numeric_limits<double>::infinity();
  }
  return naive_top_k(ranked, k);
}

}  // namespace dropless::testing
