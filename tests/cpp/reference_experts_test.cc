// The reference experts. Gradients: the whole layer, put together from the reference operations,
// against finite differences of a naive layer in double. Mixed precision: what is rounded where.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dropless/combine.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/groups.h"

namespace dropless {
namespace {

using namespace dropless::testing;

double act(const ActivationOptions& options, double z) {
  z = std::min<double>(z, options.gate_limit);
  switch (options.kind) {
    case ActivationKind::kSilu:
      return z / (1 + std::exp(-options.slope * z));
    case ActivationKind::kGelu:
      return z * (1 + std::erf(z * M_SQRT1_2)) / 2;
    case ActivationKind::kGeluTanh:
      return z / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    case ActivationKind::kRelu:
      return std::max(z, 0.0);
    case ActivationKind::kReluSquared:
      return std::pow(std::max(z, 0.0), 2);
  }
  return 0;
}

double glu(const ActivationOptions& options, double gate, double up) {
  if (!options.gated) return act(options, gate);
  const double limit = options.up_limit;
  return act(options, gate) * (std::clamp(up, -limit, limit) + options.up_offset);
}

// All parameters of a small layer, float32, with the routing of `groups`.
struct Layer {
  static constexpr int64_t kPerToken = 2, kH = 5, kI = 4;
  Groups groups;
  ActivationOptions activation;
  RoutedRows routed;
  int64_t rows, experts;
  Array x, gate, up, down, gate_bias, up_bias, down_bias, weights, dy;

  Layer(const Groups& g, const ActivationOptions& a, bool biased, Rng& rng)
      : groups(g),
        activation(a),
        routed(routed_rows(g, kPerToken, rng)),
        rows(g.rows()),
        experts(g.num_experts()) {
    x = normal(rng, DType::kF32, {routed.tokens, kH});
    gate = normal(rng, DType::kF32, {experts, kH, kI});
    if (a.gated) up = normal(rng, DType::kF32, {experts, kH, kI});
    down = normal(rng, DType::kF32, {experts, kI, kH});
    weights = normal(rng, DType::kF32, {routed.tokens, kPerToken});
    dy = normal(rng, DType::kF32, {routed.tokens, kH});
    if (!biased) return;
    gate_bias = normal(rng, DType::kF32, {experts, kI});
    if (a.gated) up_bias = normal(rng, DType::kF32, {experts, kI});
    down_bias = normal(rng, DType::kF32, {experts, kH});
  }
};

// The parameters in double, and the loss sum(dy * y) of the layer by its definition, slot by slot.
struct Naive {
  const Layer& layer;
  std::vector<double> x, gate, up, down, gate_bias, up_bias, down_bias, weights;

  explicit Naive(const Layer& l) : layer(l) {
    const auto copy = [](const Array& from, std::vector<double>& to) {
      for (int64_t i = 0; i < from.size(); ++i) to.push_back(from[i]);
    };
    copy(l.x, x), copy(l.gate, gate), copy(l.up, up), copy(l.down, down), copy(l.weights, weights);
    copy(l.gate_bias, gate_bias), copy(l.up_bias, up_bias), copy(l.down_bias, down_bias);
  }

  double loss() const {
    constexpr int64_t H = Layer::kH, I = Layer::kI;
    const std::vector<int32_t> offsets = layer.groups.offsets();
    double total = 0;
    for (int64_t slot = 0; slot < layer.weights.size(); ++slot) {
      const int64_t row = layer.routed.row_of_slot.as<int32_t>()[slot];
      const int64_t t = slot / Layer::kPerToken;
      if (row < 0) continue;
      const int64_t e = std::upper_bound(offsets.begin(), offsets.end(), row) - offsets.begin() - 1;
      std::vector<double> a(I);
      for (int64_t i = 0; i < I; ++i) {
        double g = gate_bias.empty() ? 0 : gate_bias[e * I + i];
        double u = up_bias.empty() ? 0 : up_bias[e * I + i];
        for (int64_t k = 0; k < H; ++k) {
          g += x[t * H + k] * gate[(e * H + k) * I + i];
          if (!up.empty()) u += x[t * H + k] * up[(e * H + k) * I + i];
        }
        a[i] = glu(layer.activation, g, u);
      }
      for (int64_t k = 0; k < H; ++k) {
        double o = down_bias.empty() ? 0 : down_bias[e * H + k];
        for (int64_t i = 0; i < I; ++i) o += a[i] * down[(e * I + i) * H + k];
        total += layer.dy[t * H + k] * weights[slot] * o;
      }
    }
    return total;
  }

  // Central differences of the loss by every element of one parameter.
  ::testing::AssertionResult matches(const Array& gradient, std::vector<double>& parameter) {
    constexpr double kStep = 1e-5;  // series error h^2, rounding error 1e-16 / h, on values near 10
    for (int64_t i = 0; i < gradient.size(); ++i) {
      const double at = parameter[i];
      parameter[i] = at + kStep;
      const double above = loss();
      parameter[i] = at - kStep;
      const double below = loss();
      parameter[i] = at;
      const double expected = (above - below) / (2 * kStep);
      if (std::abs(gradient[i] - expected) <= 1e-6 + 4e-6 * std::abs(expected)) continue;
      return ::testing::AssertionFailure() << "element " << i << " of " << gradient.shape()
                                           << ": got " << gradient[i] << ", expected " << expected;
    }
    return ::testing::AssertionSuccess();
  }
};

using Param = std::tuple<Groups, ActivationOptions, bool /* biases */>;

class ExpertGradients : public ::testing::TestWithParam<Param> {};

TEST_P(ExpertGradients, Q4_EveryGradientMatchesFiniteDifferences) {
  const auto& [groups, activation, biased] = GetParam();
  Rng rng(71);
  const Layer l(groups, activation, biased, rng);
  constexpr int64_t K = Layer::kPerToken, H = Layer::kH, I = Layer::kI;
  const int64_t M = l.rows, E = l.experts, T = l.routed.tokens;
  const int64_t P = activation.parts();
  const auto f32 = [](std::vector<int64_t> dims) { return Array(DType::kF32, std::move(dims)); };

  const Array h = f32({M, P, I}), a = f32({M, I}), o = f32({M, H}), y = f32({T, H});
  ExpertUpArgs up{};
  up.x = l.x, up.gate = l.gate, up.up = l.up, up.gate_bias = l.gate_bias, up.up_bias = l.up_bias;
  up.offsets = l.routed.offsets, up.slot_of_row = l.routed.slot_of_row, up.experts_per_token = K;
  up.activation = activation, up.h = h, up.a = a;
  ASSERT_TRUE(reference::expert_up(up).ok());
  ASSERT_TRUE(
      reference::grouped_gemm({a, {}, l.down, {}, l.down_bias, l.routed.offsets, false, o}).ok());
  ASSERT_TRUE(reference::combine({o, l.routed.row_of_slot, l.weights, y}).ok());
  double loss = 0;
  for (int64_t i = 0; i < y.size(); ++i) loss += y[i] * l.dy[i];
  Naive naive(l);
  EXPECT_NEAR(loss, naive.loss(), 1e-4 + 1e-5 * std::abs(naive.loss()));

  const Array dh = f32({M, P, I}), pa = f32({M, I}), d_weights = f32({T, K});
  ExpertDownBackwardArgs back{};
  back.dy = l.dy, back.down = l.down, back.down_bias = l.down_bias, back.h = h;
  back.weights = l.weights, back.offsets = l.routed.offsets;
  back.slot_of_row = l.routed.slot_of_row, back.activation = activation;
  back.dh = dh, back.pa = pa, back.d_weights = d_weights;
  ASSERT_TRUE(reference::expert_down_backward(back).ok());
  EXPECT_TRUE(naive.matches(d_weights, naive.weights));

  const Array dx_rows = f32({M, H}), dx = f32({T, H});
  ASSERT_TRUE(
      reference::expert_up_backward({dh, {}, l.gate, l.up, {}, {}, l.routed.offsets, dx_rows})
          .ok());
  ASSERT_TRUE(reference::combine({dx_rows, l.routed.row_of_slot, {}, dx}).ok());
  EXPECT_TRUE(naive.matches(dx, naive.x));

  const Array d_gate = f32({E, H, I}), d_up = f32({E, H, I}), d_down = f32({E, I, H});
  GroupedWgradArgs wgrad{};
  wgrad.x = l.x, wgrad.dy = dh, wgrad.slot_of_row = l.routed.slot_of_row;
  wgrad.offsets = l.routed.offsets, wgrad.gather = Gather::kLhs, wgrad.experts_per_token = K;
  wgrad.dw[0] = d_gate;
  if (activation.gated) wgrad.dw[1] = d_up;
  ASSERT_TRUE(reference::grouped_wgrad(wgrad).ok());
  EXPECT_TRUE(naive.matches(d_gate, naive.gate));
  if (activation.gated) {
    EXPECT_TRUE(naive.matches(d_up, naive.up));
  }
  Tensor dy_planes = l.dy;  // [T, 1, H]
  dy_planes.rank = 3, dy_planes.dims[1] = 1, dy_planes.dims[2] = H;
  wgrad.x = pa, wgrad.dy = dy_planes, wgrad.gather = Gather::kRhs;
  wgrad.dw[0] = d_down, wgrad.dw[1] = Tensor();
  ASSERT_TRUE(reference::grouped_wgrad(wgrad).ok());
  EXPECT_TRUE(naive.matches(d_down, naive.down));

  if (!biased) return;
  const Array d_up_biases = f32({E, P, I}), d_down_bias = f32({E, 1, H});
  ASSERT_TRUE(reference::group_sum({dh, {}, {}, l.routed.offsets, false, K, d_up_biases}).ok());
  ASSERT_TRUE(reference::group_sum({dy_planes, l.routed.slot_of_row, l.weights, l.routed.offsets,
                                    true, K, d_down_bias})
                  .ok());
  Array d_gate_bias = f32({E, I}), d_up_bias = f32({E, I});
  for (int64_t i = 0; i < E * I; ++i) {
    d_gate_bias.set(i, d_up_biases[i / I * P * I + i % I]);
    if (activation.gated) d_up_bias.set(i, d_up_biases[i / I * 2 * I + I + i % I]);
  }
  EXPECT_TRUE(naive.matches(d_gate_bias, naive.gate_bias));
  if (activation.gated) {
    EXPECT_TRUE(naive.matches(d_up_bias, naive.up_bias));
  }
  EXPECT_TRUE(naive.matches(d_down_bias, naive.down_bias));
}

INSTANTIATE_TEST_SUITE_P(
    All, ExpertGradients,
    ::testing::Combine(
        ::testing::Values(Groups{"b1_empty", {3, 0, 4}}, Groups{"a1_tail", {2, 3}, 0, 4},
                          Groups{"j13_first_positive", {2, 0, 3}, 3, 1}, Groups{"one_expert", {5}},
                          Groups{"no_rows", {0, 0}, 0, 4}),
        ::testing::Values(ActivationOptions{}, ActivationOptions{ActivationKind::kGelu},
                          ActivationOptions{ActivationKind::kGeluTanh},
                          ActivationOptions{ActivationKind::kRelu},
                          ActivationOptions{ActivationKind::kReluSquared, false},
                          ActivationOptions{ActivationKind::kGelu, false, 1.0f, 1.5f},
                          ActivationOptions{ActivationKind::kSilu, true, 1.702f, 2.0f, 1.5f, 1.0f}),
        ::testing::Bool()),
    [](const auto& info) {
      const ActivationOptions& options = std::get<1>(info.param);
      return std::get<0>(info.param).name + "_act" +
             std::to_string(static_cast<int>(options.kind)) + (options.plain() ? "" : "_options") +
             (std::get<2>(info.param) ? "_biased" : "");
    });

}  // namespace
}  // namespace dropless
