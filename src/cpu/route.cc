#include "dropless/route.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/element.h"
#include "core/exception_status.h"
#include "core/router_math.h"
#include "cpu/chunks.h"
#include "cpu/vector_ops.h"

namespace dropless::cpu {
namespace {

// A few dozen tokens keep a thread busy for some ten microseconds; the partial sums of at most 1024
// pieces stay small. Depends on T alone.
int64_t tokens_per_chunk(int64_t tokens) { return std::max<int64_t>(64, ceil_div(tokens, 1024)); }

// Buffers of one thread for the row of one token, padded as vector_ops.h asks.
class Scratch {
 public:
  explicit Scratch(int64_t num_experts, int64_t num_groups = 1)
      : num_experts_(num_experts),
        padded_(ceil_div(num_experts, kRowPadding) * kRowPadding),
        group_scores_(static_cast<size_t>(num_groups)) {
    const size_t n = static_cast<size_t>(padded_);
    logits_.assign(n, -std::numeric_limits<float>::infinity());
    for (std::vector<float>* v : {&scores_, &slopes_, &keys_, &gradient_}) v->assign(n, 0.0f);
  }

  RouterRow read(const ConstTensor& logits /* [T, E] */, int64_t t) {
    const int64_t begin = t * num_experts_;
    if (logits.dtype == DType::kF32) {
      std::copy_n(logits.as<float>() + begin, num_experts_, logits_.data());
    } else {
      std::transform(logits.as<uint16_t>() + begin, logits.as<uint16_t>() + begin + num_experts_,
                     logits_.data(), bf16_to_float);
    }
    return {logits_.data(), padded_, 0.0f, 0.0f, scores_.data(), slopes_.data()};
  }

  int64_t padding() const { return padded_ - num_experts_; }
  float* keys() { return keys_.data(); }
  float* group_scores() { return group_scores_.data(); }
  float* gradient() { return gradient_.data(); }

 private:
  int64_t num_experts_;
  int64_t padded_;
  std::vector<float> logits_, scores_, slopes_, keys_, group_scores_, gradient_;
};

// Integers in the order of top-k: NaN below everything, -0 equal to +0.
int32_t rank_of(float key) {
  if (key != key) return std::numeric_limits<int32_t>::min();
  const int32_t bits = std::bit_cast<int32_t>(key + 0.0f);
  return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

// The K best of E keys, best first. `ranks` [K] is scratch.
void top_k(const float* keys, int64_t num_experts, int64_t k, int32_t* ranks, int32_t* ids) {
  int64_t count = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int32_t rank = rank_of(keys[e]);
    if (count == k && (k == 0 || rank <= ranks[k - 1])) continue;
    // Equal ranks keep the earlier expert in front.
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && ranks[at - 1] < rank; --at) {
      ranks[at] = ranks[at - 1];
      ids[at] = ids[at - 1];
    }
    ranks[at] = rank;
    ids[at] = static_cast<int32_t>(e);
  }
}

// One chosen expert.
struct Choice {
  int64_t id;
  int64_t slot;
  float score = 0.0f;
  float normalized = 0.0f;  // the weight before `scale`
  float slope = 0.0f;       // d normalized / d logit while the weights' divisor stays
};

// Fills `choices` with the slots of a token that hold an expert, each expert once.
void valid_choices(const int32_t* ids /* [K] */, int64_t t, int64_t per_token, int64_t num_experts,
                   std::vector<Choice>& choices) {
  choices.clear();
  for (int64_t k = 0; k < per_token; ++k) {
    const bool repeats = std::find(ids, ids + k, ids[k]) != ids + k;
    if (ids[k] < 0 || ids[k] >= num_experts || repeats) continue;
    choices.push_back({ids[k], t * per_token + k});
  }
}

// Softmax of rate * logit.
void softmax_of_choices(const float* logits, float rate, std::vector<Choice>& choices,
                        float Choice::*out) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const Choice& c : choices) largest = std::max(largest, logits[c.id]);
  float sum = 0.0f;
  for (Choice& c : choices) sum += c.*out = std::exp(rate * (logits[c.id] - largest));
  for (Choice& c : choices) c.*out /= sum;
}

// Scores a choice by its logit alone; returns the derivative of the score's logarithm.
float score_choice(RouterScore score, float z, Choice& choice) {
  const float e = std::exp(-std::fabs(z));
  const float sigmoid = (z > 0.0f ? 1.0f : e) / (1.0f + e);
  if (score == RouterScore::kSigmoid) {
    choice.score = sigmoid;
    return (z > 0.0f ? e : 1.0f) / (1.0f + e);
  }
  if (z < router::kScoreIsExp) {
    choice.score = std::exp(0.5f * z);
    return 0.5f;
  }
  const float softplus = (z > 0.0f ? z : 0.0f) + std::log1p(e);
  choice.score = std::sqrt(softplus);
  return 0.5f * sigmoid / softplus;
}

// Fills score, normalized and slope; returns whether the weights' divisor depends on the scores.
// `row.scores` must hold the softmax if that is the score.
bool weigh_choices(const RouterOptions& options, const RouterRow& row,
                   std::vector<Choice>& choices) {
  const bool elementwise = router::is_positive_elementwise(options.score);
  if (options.score == RouterScore::kSoftmax && !options.score_before_topk) {
    softmax_of_choices(row.logits, 1.0f, choices, &Choice::score);
  }
  float sum = 0.0f;
  for (Choice& c : choices) {
    const float z = row.logits[c.id];
    c.slope = 1.0f;
    if (elementwise) {
      c.slope = score_choice(options.score, z, c);
    } else if (options.score == RouterScore::kIdentity) {
      c.score = z;
    } else if (options.score_before_topk) {
      c.score = row.scores[c.id];
    }
    sum += c.score;
  }
  const float eps = options.renormalize_eps;
  const bool is_clamped = options.renormalize_clamp && sum < eps;
  float divisor = 1.0f;
  if (options.renormalize) divisor = is_clamped ? eps : options.renormalize_clamp ? sum : sum + eps;
  // Scores of very negative logits underflow, but their ratios are those of exponentials.
  constexpr float kUnderflow = 1e-30f;
  const bool is_exponential = options.score != RouterScore::kIdentity;
  if (options.renormalize && is_exponential && divisor < kUnderflow && eps == 0.0f) {
    softmax_of_choices(row.logits, router::exp_rate(options.score), choices, &Choice::normalized);
  } else {
    for (Choice& c : choices) c.normalized = c.score / divisor;
  }
  for (Choice& c : choices) {
    c.slope = options.score == RouterScore::kIdentity ? 1.0f / divisor : c.normalized * c.slope;
  }
  return options.renormalize && !is_clamped;
}

// Adds the gradient of the chosen experts' weights to d_logits [E], but for softmax over all
// experts leaves out what goes through its denominator: returns the sum of d_score * score that
// belongs there.
float weights_backward(const RouterOptions& options, const float* d_weights /* [T, K] */,
                       bool divisor_depends, const std::vector<Choice>& choices, float* d_logits) {
  float mean = 0.0f;
  if (divisor_depends) {
    for (const Choice& c : choices) mean += d_weights[c.slot] * c.normalized;
  }
  float total = 0.0f;
  for (const Choice& c : choices) {
    total += options.scale * c.normalized * (d_weights[c.slot] - mean);
  }
  const bool softmax_of_chosen =
      options.score == RouterScore::kSoftmax && !options.score_before_topk;
  for (const Choice& c : choices) {
    d_logits[c.id] += options.scale * c.slope * (d_weights[c.slot] - mean);
    if (softmax_of_chosen) d_logits[c.id] -= c.score * total;
  }
  return total;
}

bool any_nonzero(const ConstTensor& t) {
  const float* values = t.as<float>();
  return std::any_of(values, values + t.size(), [](float v) { return v != 0.0f; });
}

// What a piece of tokens adds to the statistics.
struct Partial {
  std::vector<float> prob_sum;  // [E], padded
  double lse_squares = 0, entropies = 0;
  int32_t real_tokens = 0;
  int64_t non_finite = 0;
};

// Whether the statistics are about softmax, and not about elementwise scores over their sum.
bool counts_softmax(RouterScore score) { return !router::is_positive_elementwise(score); }

// Fills row.scores; returns their sum where they are elementwise.
float score_row(RouterScore score, const RouterRow& row) {
  const VectorOps& ops = vector_ops();
  if (score == RouterScore::kSigmoid) return ops.sigmoid(row);
  if (score == RouterScore::kSqrtSoftplus) return ops.sqrt_softplus(row);
  ops.softmax(row);
  return 1.0f;
}

// Chooses by the logits of a row: ids [K].
void select_experts(const RouteArgs& args, const RouterRow& row, Scratch& scratch, int32_t* ranks,
                    int32_t* ids) {
  const int64_t num_experts = args.logits.dims[1];
  const float* keys = row.logits;
  if (args.selection_bias.given() || args.options.num_groups > 1) {
    router::selection_keys(args.options, row.logits, args.selection_bias.as<float>(), num_experts,
                           scratch.keys(), scratch.group_scores());
    keys = scratch.keys();
  }
  top_k(keys, num_experts, args.ids.dims[1], ranks, ids);
}

void route_tokens(const RouteArgs& args, int64_t begin, int64_t end, Partial& partial) {
  const VectorOps& ops = vector_ops();
  const int64_t num_experts = args.logits.dims[1];
  const int64_t per_token = args.ids.dims[1];
  Scratch scratch(num_experts, args.options.num_groups);
  std::vector<int32_t> ranks(static_cast<size_t>(per_token));
  std::vector<int32_t> candidates(static_cast<size_t>(per_token));
  std::vector<Choice> choices;
  partial.prob_sum.assign(static_cast<size_t>(num_experts + scratch.padding()), 0.0f);
  for (int64_t t = begin; t < end; ++t) {
    int32_t* ids = args.ids.as<int32_t>() + t * per_token;
    float* weights = args.weights.as<float>() + t * per_token;
    std::fill_n(ids, per_token, -1);
    std::fill_n(weights, per_token, 0.0f);
    if (args.mask.given() && args.mask.as<uint8_t>()[t] == 0) continue;

    RouterRow row = scratch.read(args.logits, t);
    if (args.forced_ids.given() && args.forced_ids.as<int32_t>()[t * per_token] != kRouteFreely) {
      std::copy_n(args.forced_ids.as<int32_t>() + t * per_token, per_token, candidates.data());
    } else {
      select_experts(args, row, scratch, ranks.data(), candidates.data());
    }
    valid_choices(candidates.data(), t, per_token, num_experts, choices);
    if (choices.empty()) continue;

    partial.non_finite += ops.describe(row) - scratch.padding();
    const float scores_sum = score_row(args.options.score, row);
    partial.entropies +=
        counts_softmax(args.options.score)
            ? ops.add_softmax_statistics(row, partial.prob_sum.data())
            : ops.add_elementwise_statistics(row, scores_sum, partial.prob_sum.data());
    partial.lse_squares += static_cast<double>(row.lse) * row.lse;
    ++partial.real_tokens;

    weigh_choices(args.options, row, choices);
    for (const Choice& c : choices) {
      args.ids.as<int32_t>()[c.slot] = static_cast<int32_t>(c.id);
      args.weights.as<float>()[c.slot] = c.normalized * args.options.scale;
    }
  }
}

// d_logits [E] of a token with these choices.
void backward_token(const RouteBackwardArgs& args, int64_t t, bool statistics, Scratch& scratch,
                    std::vector<Choice>& choices, float* d_logits) {
  const VectorOps& ops = vector_ops();
  const RouterOptions& options = args.options;
  const int64_t num_experts = args.logits.dims[1];
  RouterRow row = scratch.read(args.logits, t);
  const bool softmax_of_all = options.score == RouterScore::kSoftmax && options.score_before_topk;
  float scores_sum = 0.0f;
  if (statistics || softmax_of_all) {
    ops.describe(row);
    scores_sum = score_row(options.score, row);
  }
  const bool divisor_depends = weigh_choices(options, row, choices);
  const float chosen =
      weights_backward(options, args.d_weights.as<float>(), divisor_depends, choices, d_logits);
  if (!statistics && !softmax_of_all) return;
  const float* d_sums = args.d_sums.as<float>();
  // scratch.keys() holds d_prob_sum, padded.
  const RouterGradient gradient = {scratch.keys(), d_sums[1], d_sums[0] * 2.0f * row.lse,
                                   softmax_of_all ? chosen : 0.0f};
  if (counts_softmax(options.score)) {
    ops.softmax_backward(row, gradient, scratch.gradient());
  } else {
    ops.elementwise_backward(row, scores_sum, gradient, scratch.gradient());
  }
  for (int64_t e = 0; e < num_experts; ++e) d_logits[e] += scratch.gradient()[e];
}

}  // namespace

Status route(const RouteArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.ids.dims[0];
  const int64_t num_experts = args.logits.dims[1];
  const int64_t chunk = tokens_per_chunk(tokens);
  std::vector<Partial> partials(static_cast<size_t>(ceil_div(tokens, chunk)));
  for_chunks(executor, tokens, chunk, [&](int64_t begin, int64_t end) {
    route_tokens(args, begin, end, partials[static_cast<size_t>(begin / chunk)]);
  });

  const ScopedIeeeFloats ieee;  // as in the pieces: the caller's thread may flush subnormals
  for (int64_t e = 0; e < num_experts; ++e) {
    double sum = 0;
    for (const Partial& p : partials) sum += p.prob_sum[static_cast<size_t>(e)];
    args.prob_sum.as<float>()[e] = static_cast<float>(sum);
  }
  Partial total;
  for (const Partial& p : partials) {
    total.lse_squares += p.lse_squares;
    total.entropies += p.entropies;
    total.real_tokens += p.real_tokens;
    total.non_finite += p.non_finite;
  }
  args.sums.as<float>()[0] = static_cast<float>(total.lse_squares);
  args.sums.as<float>()[1] = static_cast<float>(total.entropies);
  args.counters.as<int32_t>()[0] = total.real_tokens;
  // T*E may pass int32: the largest count it can hold says "many" as well.
  args.counters.as<int32_t>()[1] = static_cast<int32_t>(
      std::min<int64_t>(total.non_finite, std::numeric_limits<int32_t>::max()));
  return plan(PlanArgs{args.ids, args.capacity, args.plan}, executor);
} catch (...) {
  return exception_status("route");
}

Status route_backward(const RouteBackwardArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.ids.dims[0];
  const int64_t num_experts = args.logits.dims[1];
  const ScopedIeeeFloats ieee;  // the caller's thread may take subnormals for zero
  const bool statistics = any_nonzero(args.d_prob_sum) || any_nonzero(args.d_sums);
  for_chunks(executor, tokens, tokens_per_chunk(tokens), [&](int64_t begin, int64_t end) {
    Scratch scratch(num_experts);
    std::copy_n(args.d_prob_sum.as<float>(), num_experts, scratch.keys());
    std::vector<Choice> choices;
    const int64_t per_token = args.ids.dims[1];
    for (int64_t t = begin; t < end; ++t) {
      float* d_logits = args.d_logits.as<float>() + t * num_experts;
      std::fill_n(d_logits, num_experts, 0.0f);
      valid_choices(args.ids.as<int32_t>() + t * per_token, t, per_token, num_experts, choices);
      if (choices.empty()) continue;  // padding
      backward_token(args, t, statistics, scratch, choices, d_logits);
    }
  });
  return Status();
} catch (...) {
  return exception_status("route_backward");
}

}  // namespace dropless::cpu
