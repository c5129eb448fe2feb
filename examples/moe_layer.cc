// One Mixture-of-Experts layer, forward and backward, through the C++ API alone.
//
//   logits = x @ router;  ids, p = top-k of softmax(logits)
//   y[t]   = sum over k of p[t,k] * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]
//            with e = ids[t,k]
//   loss   = sum(y * target) + 0.01 * load balance + 0.001 * z
//
// It prints the loss, the load of each expert and the norm of each gradient, and checks the
// gradients against finite differences: exit status 1 if one of them is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "dropless/balance_loss.h"
#include "dropless/combine.h"
#include "dropless/executor.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/route.h"

namespace {

using namespace dropless;

// T tokens, H model width, I expert width, E experts, K experts per token.
constexpr int64_t T = 96, H = 64, I = 40, E = 8, K = 2, M = T * K;
constexpr float kBalanceCoefficient = 0.01f, kZCoefficient = 0.001f;

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// An array that owns its memory and is a Tensor wherever one is asked for.
template <class Element, DType kDType>
struct Owned {
  std::vector<int64_t> dims;
  std::vector<Element> data;

  explicit Owned(std::vector<int64_t> shape) : dims(std::move(shape)) {
    const auto count = std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
    data.resize(static_cast<size_t>(count));
  }
  Tensor view() const {
    Tensor t;
    t.data = const_cast<Element*>(data.data());
    t.dtype = kDType;
    for (const int64_t d : dims) t.dims[t.rank++] = d;
    return t;
  }
  operator Tensor() const { return view(); }
  operator ConstTensor() const { return view(); }
};
using Floats = Owned<float, DType::kF32>;
using Ints = Owned<int32_t, DType::kI32>;

// The same memory with one more axis of size 1 in the middle: [rows, cols] as [rows, 1, cols].
Tensor with_plane(const Floats& a) {
  Tensor t = a;
  t.dims[2] = t.dims[1];
  t.dims[1] = 1;
  t.rank = 3;
  return t;
}

// What is learned, and (in a second one of these) its gradients.
struct Parameters {
  Floats x{{T, H}};
  Floats router{{1, H, E}};  // one group: a plain matrix is a grouped one with one expert
  Floats gate{{E, H, I}}, up{{E, H, I}}, down{{E, I, H}};

  std::vector<std::pair<std::string, Floats*>> named() {
    return {{"x", &x}, {"router", &router}, {"gate", &gate}, {"up", &up}, {"down", &down}};
  }
};

class Layer {
 public:
  explicit Layer(Executor& executor) : executor_(executor) { all_tokens_.data = {0, T}; }

  double forward(const Parameters& p, const Floats& target) {
    must(cpu::grouped_gemm({p.x, {}, p.router, {}, {}, all_tokens_, false, logits_}, executor_));
    RouteArgs route;
    route.logits = logits_;
    route.ids = ids_;
    route.weights = weights_;
    route.prob_sum = prob_sum_;
    route.sums = sums_;
    route.counters = counters_;
    route.plan = {counts_, offsets_, slot_of_row_, row_of_slot_};
    must(cpu::route(route, executor_));

    ExpertUpArgs up;
    up.x = p.x;
    up.gate = p.gate;
    up.up = p.up;
    up.offsets = offsets_;
    up.slot_of_row = slot_of_row_;
    up.experts_per_token = K;
    up.h = h_;
    up.a = a_;
    must(cpu::expert_up(up, executor_));
    must(cpu::grouped_gemm({a_, {}, p.down, {}, {}, offsets_, false, o_}, executor_));
    must(cpu::combine({o_, row_of_slot_, weights_, y_}, executor_));

    double loss = std::inner_product(y_.data.begin(), y_.data.end(), target.data.begin(), 0.0);
    loss += kBalanceCoefficient *
            load_balance_loss(counts_.data.data(), prob_sum_.data.data(), E, K, T);
    return loss + kZCoefficient * z_loss(sums_.data[0], T);
  }

  // Gradients of the last forward's loss; d(loss)/dy is the target.
  void backward(const Parameters& p, const Floats& target, Parameters& d) {
    ExpertDownBackwardArgs down;
    down.dy = target;
    down.down = p.down;
    down.h = h_;
    down.weights = weights_;
    down.offsets = offsets_;
    down.slot_of_row = slot_of_row_;
    down.dh = dh_;
    down.pa = pa_;
    down.d_weights = d_weights_;
    must(cpu::expert_down_backward(down, executor_));
    must(cpu::expert_up_backward({dh_, {}, p.gate, p.up, {}, {}, offsets_, dx_rows_}, executor_));
    must(cpu::combine({dx_rows_, row_of_slot_, {}, d.x}, executor_));

    GroupedWgradArgs wgrad;
    wgrad.slot_of_row = slot_of_row_;
    wgrad.offsets = offsets_;
    wgrad.experts_per_token = K;
    wgrad.x = p.x;
    wgrad.dy = dh_;
    wgrad.gather = Gather::kLhs;
    wgrad.dw[0] = d.gate;
    wgrad.dw[1] = d.up;
    must(cpu::grouped_wgrad(wgrad, executor_));
    wgrad.x = pa_;
    wgrad.dy = with_plane(target);
    wgrad.gather = Gather::kRhs;
    wgrad.dw[0] = d.down;
    wgrad.dw[1] = Tensor();
    must(cpu::grouped_wgrad(wgrad, executor_));

    // The losses of balance depend on the logits through prob_sum and the sum of lse^2.
    for (size_t e = 0; e < E; ++e) {
      d_prob_sum_.data[e] =
          kBalanceCoefficient * E * static_cast<float>(counts_.data[e]) / (K * T * T);
    }
    d_sums_.data = {kZCoefficient / T, 0.0f};
    must(cpu::route_backward(
        {RouterOptions(), logits_, ids_, d_weights_, d_prob_sum_, d_sums_, d_logits_}, executor_));
    must(cpu::grouped_gemm({d_logits_, {}, p.router, {}, {}, all_tokens_, true, dx_router_},
                           executor_));
    for (size_t i = 0; i < d.x.data.size(); ++i) d.x.data[i] += dx_router_.data[i];
    GroupedWgradArgs router;
    router.x = p.x;
    router.dy = with_plane(d_logits_);
    router.offsets = all_tokens_;
    router.dw[0] = d.router;
    must(cpu::grouped_wgrad(router, executor_));
  }

  const std::vector<int32_t>& counts() const { return counts_.data; }
  int64_t dropped() const { return M - offsets_.data[E]; }

 private:
  Executor& executor_;
  Ints all_tokens_{{2}};
  Floats logits_{{T, E}}, weights_{{T, K}}, prob_sum_{{E}}, sums_{{2}};
  Ints ids_{{T, K}}, counters_{{2}}, counts_{{E}}, offsets_{{E + 1}};
  Ints slot_of_row_{{M}}, row_of_slot_{{T, K}};
  Floats h_{{M, 2, I}}, a_{{M, I}}, o_{{M, H}}, y_{{T, H}};
  Floats dh_{{M, 2, I}}, pa_{{M, I}}, d_weights_{{T, K}}, dx_rows_{{M, H}}, dx_router_{{T, H}};
  Floats d_prob_sum_{{E}}, d_sums_{{2}}, d_logits_{{T, E}};
};

double norm(const Floats& a) {
  return std::sqrt(std::inner_product(a.data.begin(), a.data.end(), a.data.begin(), 0.0));
}

// Compares <gradient, v> with a central difference of the loss along v, a unit vector that leans
// half towards the gradient and half in a random direction. Returns the relative difference.
double difference_along(Layer& layer, Parameters& p, const Floats& target, Floats& parameter,
                        const Floats& gradient, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  Floats v = gradient;
  const float length = static_cast<float>(norm(gradient));
  const float random_length = std::sqrt(static_cast<float>(v.data.size()));
  for (float& e : v.data) e = e / length + normal(rng) / random_length;
  const float v_length = static_cast<float>(norm(v));
  for (float& e : v.data) e /= v_length;

  // Large enough that rounding of the loss (1e-6) hardly shows, small against the parameters.
  constexpr float kStep = 0.02f;
  const std::vector<float> at = parameter.data;
  const auto loss_at = [&](float step) {
    for (size_t i = 0; i < at.size(); ++i) parameter.data[i] = at[i] + step * v.data[i];
    const double loss = layer.forward(p, target);
    parameter.data = at;
    return loss;
  };
  const double measured = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
  const double expected =
      std::inner_product(gradient.data.begin(), gradient.data.end(), v.data.begin(), 0.0);
  return std::abs(measured - expected) / std::abs(expected);
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  Parameters p, d;
  Floats target{{T, H}};
  const auto fill = [&rng](Floats& a, double stddev) {
    std::normal_distribution<float> normal(0.0f, static_cast<float>(stddev));
    for (float& e : a.data) e = normal(rng);
  };
  fill(p.x, 1.0);
  fill(target, 1.0);
  for (Floats* w : {&p.router, &p.gate, &p.up}) fill(*w, 1 / std::sqrt(H));
  fill(p.down, 1 / std::sqrt(I));

  const std::unique_ptr<Executor> pool = make_thread_pool(0);
  Layer layer(*pool);
  std::printf("loss %.6f with %d thread(s)\n", layer.forward(p, target), pool->concurrency());
  std::printf("tokens per expert:");
  for (const int32_t count : layer.counts()) std::printf(" %d", count);
  std::printf("; dropped: %lld\n", static_cast<long long>(layer.dropped()));
  layer.backward(p, target, d);

  // Third derivatives times the step squared, and rounding over the step, stay below this.
  constexpr double kTolerance = 1e-3;
  bool good = layer.dropped() == 0;
  const auto parameters = p.named(), gradients = d.named();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Floats& gradient = *gradients[i].second;
    const double difference =
        difference_along(layer, p, target, *parameters[i].second, gradient, rng);
    good = good && difference < kTolerance;
    std::printf("gradient of %-6s norm %10.5f, finite differences differ by %.1e%s\n",
                parameters[i].first.c_str(), norm(gradient), difference,
                difference < kTolerance ? "" : "  WRONG");
  }
  return good ? 0 : 1;
}
