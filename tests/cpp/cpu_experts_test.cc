#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu/gemm_kernel.h"
#include "tests/cpp/support/cpu_kernels.h"
#include "tests/cpp/support/expert_products.h"

namespace dropless::testing {
namespace {

class CpuExperts : public CpuKernelTest {};

const std::vector<ExpertCase>& cases() {
  static const std::vector<ExpertCase> all = {
      {DType::kF32},
      {DType::kF32, false, true, true, {ActivationKind::kGelu}},
      {DType::kBF16, false, true, false, {ActivationKind::kGeluTanh}},
      {DType::kBF16, true, false, true},
      {DType::kF8E4M3, false, true, true, {ActivationKind::kGelu}},
      {DType::kF8E4M3, true, false, true, {}, ScaleRounding::kPow2},
      // Limits that a third of unit-scale pre-activations pass.
      {DType::kF32, false, true, false, {ActivationKind::kSilu, true, 1.702f, 0.9f, 1.1f, 1.0f}},
      {DType::kBF16, false, true, false, {ActivationKind::kSilu, true, 1.702f, 0.9f, 1.1f, 1.0f}},
      {DType::kF8E4M3, true, true, true, {ActivationKind::kGelu, true, 1.0f, 0.8f, 0.7f, -0.5f}},
      {DType::kF32, false, false, false, {ActivationKind::kReluSquared, false}},
      {DType::kBF16, true, true, true, {ActivationKind::kRelu, false, 1.0f, 1.2f}},
      {DType::kF8E4M3, false, true, true, {ActivationKind::kGeluTanh, false}},
      {DType::kBF16, false, false, false, {ActivationKind::kRelu}},
  };
  return all;
}

TEST_P(CpuExperts, A8_UpAndItsEpilogueInEveryGroupPattern) {
  Rng rng(1);
  for (const Groups& groups : adversarial_groups()) {
    for (const ExpertCase& c : cases())
      expect_up(groups, 21, 35, c, rng, OnCpu{serial_executor()}, OnCpu{pool()});
  }
}

TEST_P(CpuExperts, A8_UpWithSeveralBlocksOfColumns) {
  Rng rng(2);
  for (const ExpertCase& c : cases())
    expect_up({"blocks", {34, 0, 3}, 1, 2}, 150, 290, c, rng, OnCpu{serial_executor()},
              OnCpu{pool()});
}

TEST_P(CpuExperts, UpWithoutHWritesTheSameA) {
  Rng rng(3);
  const Groups groups{"no_h", {19, 6}};
  const Up up(groups, 30, 50, {DType::kBF16}, rng);
  const Up::Out with = up.poisoned(), without = up.poisoned();
  ExpertUpArgs args = up.args(without);
  args.h = Tensor();
  EXPECT_OK(cpu::expert_up(up.args(with), pool()));
  EXPECT_OK(cpu::expert_up(args, pool()));
  EXPECT_TRUE(with.a.same_bits(without.a));
}

TEST_P(CpuExperts, A4_DownBackwardInEveryGroupPattern) {
  Rng rng(4);
  for (const Groups& groups : adversarial_groups()) {
    for (const ExpertCase& c : cases())
      expect_down_backward(groups, 23, 37, c, rng, OnCpu{serial_executor()}, OnCpu{pool()});
  }
}

TEST_P(CpuExperts, DownBackwardWithSeveralBlocksOfColumns) {
  Rng rng(5);
  for (const ExpertCase& c : cases()) {
    expect_down_backward({"blocks", {34, 0, 3}, 1, 2}, 150, 290, c, rng, OnCpu{serial_executor()},
                         OnCpu{pool()});
  }
}

TEST_P(CpuExperts, A9_UpBackwardSumsGateAndUp) {
  Rng rng(6);
  std::vector<Groups> all = adversarial_groups();
  all.push_back({"deep", {34, 0, 3}, 1, 2});
  bool gated = false;
  for (const Groups& groups : all) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
      const int64_t hidden = groups.name == "deep" ? 161 : 29;
      gated = !gated;
      expect_up_backward(groups, 43, hidden, dtype, gated, rng, OnCpu{serial_executor()},
                         OnCpu{pool()});
    }
  }
}

// Each of the two products on its own, then both: the third is their sum.
TEST_P(CpuExperts, A9_DxIsLinearInGateAndUp) {
  Rng rng(7);
  const Groups groups{"linear", {20, 13}};
  UpBackward both(groups, 50, 70, DType::kF32, rng);
  UpBackward only_gate = both, only_up = both;
  only_gate.up.fill(0);
  only_up.gate.fill(0);
  const Array a = both.poisoned(), b = both.poisoned(), sum = both.poisoned();
  EXPECT_OK(cpu::expert_up_backward(only_gate.args(a), pool()));
  EXPECT_OK(cpu::expert_up_backward(only_up.args(b), pool()));
  EXPECT_OK(cpu::expert_up_backward(both.args(sum), pool()));
  Array added = both.poisoned();
  for (int64_t i = 0; i < added.size(); ++i) added.set(i, a[i] + b[i]);
  EXPECT_TRUE(close(sum, added, rounded_to(DType::kF32) + fp32_sum(2 * 140)));
}

// At a limit the gradient still flows, beyond it not; NaN is no number beyond.
TEST_P(CpuExperts, n5_values_and_gradients_at_the_limits) {
  const ActivationOptions options{ActivationKind::kSilu, true, 1.702f, 7.0f, 7.0f, 1.0f};
  const float inf = kNoLimit, above = std::nextafter(7.0f, 8.0f);
  const std::vector<float> points = {7.0f, above, -7.0f, -above, 0.0f, 6.0f, inf, -30.0f};
  const int64_t n = static_cast<int64_t>(points.size());
  cpu::GluOptions plain{static_cast<int>(options.kind),
                        true,
                        false,
                        options.slope,
                        options.gate_limit,
                        options.up_limit,
                        options.up_offset};
  for (const float up : points) {
    std::vector<float> gate = points, ups(points.size(), up), d_a(points.size(), 1.0f);
    std::vector<float> a(points.size()), dh_gate(a), dh_up(a), pa(a);
    cpu::GluForwardRow forward{gate.data(), ups.data(), nullptr,     nullptr,    n,
                               plain,       false,      gate.data(), ups.data(), a.data()};
    cpu::kernels().rows->glu_forward(forward);
    cpu::GluBackwardRow backward{d_a.data(), gate.data(),    ups.data(),   1.0f,     n,
                                 plain,      dh_gate.data(), dh_up.data(), pa.data()};
    cpu::kernels().rows->glu_backward(backward);
    for (size_t i = 0; i < points.size(); ++i) {
      const double g = std::min(7.0f, points[i]), u = std::clamp(up, -7.0f, 7.0f) + 1;
      const double s = 1 / (1 + std::exp(-1.702f * g));
      const double slope = points[i] > 7.0f ? 0 : s * (1 + 1.702f * g * (1 - s));
      const bool up_passes = std::abs(up) <= 7.0f;
      const double tolerance = 1e-6;  // relative: 8 fp32 roundings
      EXPECT_NEAR(a[i], g * s * u, tolerance * std::abs(g * u)) << points[i] << " " << up;
      EXPECT_NEAR(dh_gate[i], slope * u, tolerance * 8 * std::abs(u)) << points[i] << " " << up;
      EXPECT_NEAR(dh_up[i], up_passes ? g * s : 0, tolerance * std::abs(g))
          << points[i] << " " << up;
      if (points[i] > 7.0f) {
        EXPECT_EQ(dh_gate[i], 0.0f);
      }
      if (!up_passes) {
        EXPECT_EQ(dh_up[i], 0.0f);
      }
      EXPECT_EQ(pa[i], a[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuExperts, ::testing::ValuesIn(available_kernel_names()),
                         kernel_of);

}  // namespace
}  // namespace dropless::testing
