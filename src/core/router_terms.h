// The terms of one number and their places, for every backend.
#pragma once

#include <cstdint>
#include <vector>

#include "core/element.h"
#include "core/host_device.h"
#include "dropless/router_terms.h"

namespace dropless::router {

// The term that stands in place `pair` of a factor's pairs.
DROPLESS_HOST_DEVICE constexpr int term_of_pair(ProductSide side, int pair) {
  if (side == ProductSide::kLeft) return pair == 0 ? 2 : pair == 1 || pair == 3 ? 1 : 0;
  return pair == 2 ? 2 : pair == 1 || pair == 4 ? 1 : 0;
}

// `round` rounds a float to the nearest bfloat16 value.
template <class Round>
DROPLESS_HOST_DEVICE void split_terms(float a, const Round& round, float (&term)[kTerms]) {
  for (int i = 0; i < kTerms; ++i) {
    term[i] = round(a);
    const bool is_finite = term[i] - term[i] == 0.0f;
    a = is_finite ? a - term[i] : 0.0f;
  }
}

// On the host, one row: terms [3, columns], and pairs [6, columns] unless null.
inline void split_row(const float* row, int64_t columns, ProductSide side, uint16_t* terms,
                      uint16_t* pairs) {
  for (int64_t c = 0; c < columns; ++c) {
    float term[kTerms];
    split_terms(row[c], round_to_bf16, term);
    for (int t = 0; t < kTerms; ++t) terms[t * columns + c] = float_to_bf16(term[t]);
    if (pairs == nullptr) continue;
    for (int p = 0; p < kTermPairs; ++p) {
      pairs[p * columns + c] = float_to_bf16(term[term_of_pair(side, p)]);
    }
  }
}

// On the host, the logits of token t from their terms.
inline void sum_terms(const RouteOfTermsArgs& args, int64_t t) {
  const int64_t num_experts = args.logits.dims[1];
  const float* terms = args.terms.as<float>() + t * kTerms * num_experts;
  const float* bias = args.logit_bias.as<float>();
  float* logits = args.logits.as<float>() + t * num_experts;
  for (int64_t e = 0; e < num_experts; ++e) {
    logits[e] = (terms[2 * num_experts + e] + terms[num_experts + e]) + terms[e];
    if (bias != nullptr) logits[e] += bias[e];
  }
}

// On the host, the arguments of route_backward with what was left out in memory of their own.
class WholeBackward {
 public:
  explicit WholeBackward(RouteBackwardArgs args) : args_(args) {
    const int64_t num_experts = args.logits.dims[1];
    if (!args.d_prob_sum.given()) args_.d_prob_sum = zeros(prob_sum_, {num_experts});
    if (!args.d_sums.given()) args_.d_sums = zeros(sums_, {2});
    if (!args.d_logits.given()) {
      args_.d_logits = zeros(logits_, {args.logits.dims[0], num_experts});
    }
  }
  WholeBackward(const WholeBackward&) = delete;
  WholeBackward& operator=(const WholeBackward&) = delete;

  const RouteBackwardArgs& args() const { return args_; }

 private:
  static Tensor zeros(std::vector<float>& memory, std::initializer_list<int64_t> dims) {
    Tensor t{nullptr, DType::kF32, 0, {}};
    for (const int64_t dim : dims) t.dims[t.rank++] = dim;
    memory.assign(static_cast<size_t>(t.size()), 0.0f);
    t.data = memory.data();
    return t;
  }

  RouteBackwardArgs args_;
  std::vector<float> prob_sum_, sums_, logits_;
};

}  // namespace dropless::router
