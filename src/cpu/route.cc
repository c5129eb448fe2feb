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

bool is_real(const ConstTensor& mask /* [T] */, int64_t t) {
  return !mask.given() || mask.as<uint8_t>()[t] != 0;
}

// A few dozen tokens keep a thread busy for some ten microseconds; the partial sums of at most 1024
// pieces stay small. Depends on T alone.
int64_t tokens_per_chunk(int64_t tokens) { return std::max<int64_t>(64, ceil_div(tokens, 1024)); }

// Buffers of one thread for the row of one token, padded as vector_ops.h asks.
class Scratch {
 public:
  explicit Scratch(int64_t num_experts)
      : num_experts_(num_experts), padded_(ceil_div(num_experts, kRowPadding) * kRowPadding) {
    const size_t n = static_cast<size_t>(padded_);
    logits_.assign(n, -std::numeric_limits<float>::infinity());
    for (std::vector<float>* v : {&scores_, &complements_, &keys_, &gradient_}) v->assign(n, 0.0f);
  }

  RouterRow read(const ConstTensor& logits /* [T, E] */, int64_t t) {
    const int64_t begin = t * num_experts_;
    if (logits.dtype == DType::kF32) {
      std::copy_n(logits.as<float>() + begin, num_experts_, logits_.data());
    } else {
      std::transform(logits.as<uint16_t>() + begin, logits.as<uint16_t>() + begin + num_experts_,
                     logits_.data(), bf16_to_float);
    }
    return {logits_.data(), padded_, 0.0f, 0.0f, scores_.data(), complements_.data()};
  }

  int64_t padding() const { return padded_ - num_experts_; }
  float* keys() { return keys_.data(); }
  float* gradient() { return gradient_.data(); }

 private:
  int64_t num_experts_;
  int64_t padded_;
  std::vector<float> logits_, scores_, complements_, keys_, gradient_;
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
  float score;
  float complement;  // 1 - score, without cancellation
  float normalized;  // the weight before `scale`
};

void softmax_of_choices(const float* logits, std::vector<Choice>& choices, float Choice::*out) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const Choice& c : choices) largest = std::max(largest, logits[c.id]);
  float sum = 0.0f;
  for (Choice& c : choices) sum += c.*out = std::exp(logits[c.id] - largest);
  for (Choice& c : choices) c.*out /= sum;
}

// Fills score, complement and normalized. `row.scores` must hold the softmax if that is the score.
void score_choices(const RouterOptions& options, const RouterRow& row,
                   std::vector<Choice>& choices) {
  if (options.score == RouterScore::kSoftmax && !options.score_before_topk) {
    softmax_of_choices(row.logits, choices, &Choice::score);
  }
  float sum = options.renormalize_eps;
  for (Choice& c : choices) {
    if (options.score == RouterScore::kSigmoid) {
      const float z = row.logits[c.id];
      const float e = std::exp(-std::fabs(z));
      c.score = (z > 0.0f ? 1.0f : e) / (1.0f + e);
      c.complement = (z > 0.0f ? e : 1.0f) / (1.0f + e);
    } else if (options.score_before_topk) {
      c.score = row.scores[c.id];
    }
    sum += c.score;
  }
  // Scores of very negative logits underflow, but their ratios are those of exponentials.
  constexpr float kUnderflow = 1e-30f;
  if (options.renormalize && sum < kUnderflow && options.renormalize_eps == 0.0f) {
    return softmax_of_choices(row.logits, choices, &Choice::normalized);
  }
  for (Choice& c : choices) c.normalized = options.renormalize ? c.score / sum : c.score;
}

// Adds the gradient of the chosen experts' weights to d_logits [E], but for softmax over all
// experts leaves out what goes through its denominator: returns the sum of d_score * score that
// belongs there.
float weights_backward(const RouterOptions& options, const float* d_weights /* [T, K] */,
                       const std::vector<Choice>& choices, float* d_logits) {
  float mean = 0.0f;
  for (const Choice& c : choices) mean += d_weights[c.slot] * c.normalized;
  const auto d_score_times_score = [&](const Choice& c) {
    return options.scale * c.normalized * (d_weights[c.slot] - (options.renormalize ? mean : 0.0f));
  };
  float total = 0.0f;
  for (const Choice& c : choices) total += d_score_times_score(c);
  for (const Choice& c : choices) {
    const float d = d_score_times_score(c);
    if (options.score == RouterScore::kSigmoid) {
      d_logits[c.id] += d * c.complement;
    } else {
      d_logits[c.id] += options.score_before_topk ? d : d - c.score * total;
    }
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

void route_tokens(const RouteArgs& args, int64_t begin, int64_t end, Partial& partial) {
  const VectorOps& ops = vector_ops();
  const int64_t num_experts = args.logits.dims[1];
  const int64_t per_token = args.ids.dims[1];
  Scratch scratch(num_experts);
  std::vector<int32_t> ranks(static_cast<size_t>(per_token));
  std::vector<Choice> choices(static_cast<size_t>(per_token));
  partial.prob_sum.assign(static_cast<size_t>(num_experts + scratch.padding()), 0.0f);
  for (int64_t t = begin; t < end; ++t) {
    int32_t* ids = args.ids.as<int32_t>() + t * per_token;
    float* weights = args.weights.as<float>() + t * per_token;
    if (!is_real(args.mask, t)) {
      std::fill_n(ids, per_token, -1);
      std::fill_n(weights, per_token, 0.0f);
      continue;
    }
    RouterRow row = scratch.read(args.logits, t);
    const float* keys = row.logits;
    if (args.selection_bias.given()) {
      router::selection_keys(args.options, row.logits, args.selection_bias.as<float>(), num_experts,
                             scratch.keys());
      keys = scratch.keys();
    }
    top_k(keys, num_experts, per_token, ranks.data(), ids);

    partial.non_finite += ops.describe(row) - scratch.padding();
    float entropy;
    if (args.options.score == RouterScore::kSoftmax) {
      ops.softmax(row);
      entropy = ops.add_softmax_statistics(row, partial.prob_sum.data());
    } else {
      const float scores_sum = ops.sigmoid(row);
      entropy = ops.add_sigmoid_statistics(row, scores_sum, partial.prob_sum.data());
    }
    partial.lse_squares += static_cast<double>(row.lse) * row.lse;
    partial.entropies += entropy;
    ++partial.real_tokens;

    for (int64_t k = 0; k < per_token; ++k) choices[static_cast<size_t>(k)].id = ids[k];
    score_choices(args.options, row, choices);
    for (int64_t k = 0; k < per_token; ++k) {
      weights[k] = choices[static_cast<size_t>(k)].normalized * args.options.scale;
    }
  }
}

void backward_token(const RouteBackwardArgs& args, int64_t t, bool statistics, Scratch& scratch,
                    std::vector<Choice>& choices, float* d_logits /* [E] */) {
  const VectorOps& ops = vector_ops();
  const RouterOptions& options = args.options;
  const int64_t num_experts = args.logits.dims[1];
  const int64_t per_token = args.ids.dims[1];
  RouterRow row = scratch.read(args.logits, t);
  choices.clear();
  for (int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
    const int64_t id = args.ids.as<int32_t>()[slot];
    if (id >= 0 && id < num_experts) choices.push_back({id, slot, 0.0f, 0.0f, 0.0f});
  }
  const bool softmax_of_all = options.score == RouterScore::kSoftmax && options.score_before_topk;
  float scores_sum = 0.0f;
  if (statistics || softmax_of_all) {
    ops.describe(row);
    if (options.score == RouterScore::kSoftmax) {
      ops.softmax(row);
    } else {
      scores_sum = ops.sigmoid(row);
    }
  }
  score_choices(options, row, choices);

  std::fill_n(d_logits, num_experts, 0.0f);
  const float chosen = weights_backward(options, args.d_weights.as<float>(), choices, d_logits);
  if (!statistics && !softmax_of_all) return;
  const float* d_sums = args.d_sums.as<float>();
  // scratch.keys() holds d_prob_sum, padded.
  const RouterGradient gradient = {scratch.keys(), d_sums[1], d_sums[0] * 2.0f * row.lse,
                                   softmax_of_all ? chosen : 0.0f};
  if (options.score == RouterScore::kSoftmax) {
    ops.softmax_backward(row, gradient, scratch.gradient());
  } else {
    ops.sigmoid_backward(row, scores_sum, gradient, scratch.gradient());
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
    for (int64_t t = begin; t < end; ++t) {
      float* d_logits = args.d_logits.as<float>() + t * num_experts;
      if (is_real(args.mask, t)) {
        backward_token(args, t, statistics, scratch, choices, d_logits);
      } else {
        std::fill_n(d_logits, num_experts, 0.0f);
      }
    }
  });
  return Status();
} catch (...) {
  return exception_status("route_backward");
}

}  // namespace dropless::cpu
