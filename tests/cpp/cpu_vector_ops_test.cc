// The row arithmetic of every instruction set this processor runs, against double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/gemm_kernel.h"
#include "cpu/vector_ops.h"
#include "tests/cpp/support/compare.h"

namespace dropless {
namespace {

using namespace dropless::testing;
using cpu::kRowPadding;
using cpu::RouterGradient;
using cpu::RouterRow;
using cpu::VectorOps;

struct Set {
  const char* name;
  const VectorOps* ops;
};

// One a VectorOps: sets that differ in their GEMM kernels alone share it.
std::vector<Set> available_sets() {
  int count = 0;
  const cpu::KernelSet* all = cpu::available_kernels(&count);
  std::vector<Set> sets;
  for (int i = count; i-- > 0;) {
    if (sets.empty() || sets.back().ops != all[i].vectors) {
      sets.push_back({all[i].name, all[i].vectors});
    }
  }
  return sets;
}

class VectorOpsTest : public ::testing::TestWithParam<Set> {
 protected:
  const VectorOps& ops = *GetParam().ops;
  Rng rng{91};
};

constexpr int64_t kWidths[] = {0, 1, 3, 15, 16, 17, 33, 200};

TEST_P(VectorOpsTest, D8_WeightedSumOfAnyWidth) {
  for (const DType rows : {DType::kF32, DType::kBF16}) {
    for (const DType out : {DType::kF32, DType::kBF16}) {
      for (const int64_t n : kWidths) {
        for (const int64_t count : {0, 1, 3}) {
          const Array x = normal(rng, rows, {3, n}), w = normal(rng, DType::kF32, {3});
          Array got(out, {1, n}), expected(DType::kF32, {1, n});
          std::vector<const void*> addresses;
          for (int64_t k = 0; k < count; ++k) {
            addresses.push_back(x.as<uint8_t>() + k * n * size_of(rows));
          }
          for (int64_t i = 0; i < n; ++i) {
            double sum = 0;
            for (int64_t k = 0; k < count; ++k) sum += w[k] * x[k * n + i];
            expected.set(i, sum);
          }
          // Past the caches only whole, aligned lines are written: also tried one element further.
          for (const int64_t shift : {-1, 0, 1}) {
            alignas(64) uint8_t line[1024];
            std::memset(line, 0xff, sizeof(line));
            uint8_t* place = line + std::max<int64_t>(shift, 0) * size_of(out);
            ops.weighted_sum(addresses.data(), w.as<float>(), count, rows == DType::kBF16, n, place,
                             out == DType::kBF16, /*streaming=*/shift >= 0);
            std::memcpy(got.view().data, place, static_cast<size_t>(got.view().bytes()));
            EXPECT_TRUE(close(got, expected, rounded_to(out) + fp32_sum(count))) << n;
            for (const uint8_t* p = place + got.view().bytes(); p < line + sizeof(line); ++p) {
              EXPECT_EQ(*p, 0xff) << n;
            }
          }
        }
      }
    }
  }
}

TEST_P(VectorOpsTest, D8_ScaleAndDotOfAnyWidth) {
  for (const DType dy : {DType::kF32, DType::kBF16}) {
    for (const DType rows : {DType::kF32, DType::kBF16}) {
      for (const int64_t n : kWidths) {
        const Array g = normal(rng, dy, {1, n}), x = normal(rng, rows, {1, n});
        Array got(rows, {1, n}), expected(DType::kF32, {1, n});
        double dot = 0, size = 0;
        for (int64_t i = 0; i < n; ++i) {
          expected.set(i, 0.7f * g[i]);
          dot += g[i] * x[i];
          size += std::abs(g[i] * x[i]);
        }
        const float sum = ops.scale_and_dot(g.view().data, dy == DType::kBF16, x.view().data,
                                            rows == DType::kBF16, 0.7f, n, got.view().data);
        EXPECT_TRUE(close(got, expected, rounded_to(rows))) << n;
        EXPECT_NEAR(sum, dot, size * static_cast<double>(n) * 0x1p-24);
      }
    }
  }
}

TEST_P(VectorOpsTest, D8_AccumulateOfAnyWidth) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t n : kWidths) {
      const Array x = normal(rng, dtype, {1, n});
      Array got = normal(rng, DType::kF32, {1, n}), expected = got;
      for (int64_t i = 0; i < n; ++i) expected.set(i, got[i] - 1.3f * x[i]);
      ops.accumulate(x.view().data, dtype == DType::kBF16, -1.3f, n, got.as<float>());
      // Without FMA the product is rounded too; it is at most 4 RMS.
      EXPECT_TRUE(close(got, expected, rounded_to(DType::kF32) + Bound{0, 4 * 0x1p-24})) << n;
    }
  }
}

// A row of E logits, padded as vector_ops.h asks.
struct PaddedRow {
  int64_t experts, n;
  Array logits, scores, complements, zeros, out;
  RouterRow row;

  PaddedRow(int64_t e, Rng& rng, double stddev)
      : experts(e),
        n(ceil_div(e, kRowPadding) * kRowPadding),
        logits(normal(rng, DType::kF32, {1, n}, stddev)),
        scores(DType::kF32, {1, n}),
        complements(DType::kF32, {1, n}),
        zeros(DType::kF32, {1, n}),
        out(DType::kF32, {1, n}) {
    for (int64_t i = e; i < n; ++i) logits.set(i, -INFINITY);
    zeros.fill(0);
    row = {logits.as<float>(), n, 0, 0, scores.as<float>(), complements.as<float>()};
  }
  double lse() const {
    double sum = 0;
    for (int64_t i = 0; i < experts; ++i) sum += std::exp(logits[i]);
    return std::log(sum);
  }
};

constexpr int64_t kExperts[] = {1, 5, 16, 60, 129};

TEST_P(VectorOpsTest, SoftmaxAndItsStatistics) {
  for (const int64_t e : kExperts) {
    for (const double stddev : {1.0, 12.0}) {
      PaddedRow r(e, rng, stddev);
      EXPECT_EQ(ops.describe(r.row), r.n - e);
      const double lse = r.lse();
      EXPECT_NEAR(r.row.lse, lse, 4 * 0x1p-24 * (1 + std::abs(lse)));
      ops.softmax(r.row);
      Array expected(DType::kF32, {1, r.n}), prob = r.zeros;
      expected.fill(0);
      double entropy = 0;
      for (int64_t i = 0; i < e; ++i) {
        const double q = std::exp(r.logits[i] - lse);
        expected.set(i, q);
        entropy -= q * (r.logits[i] - lse);
      }
      // z - max is rounded in fp32: an error of half its ulp, which exp turns into a relative one.
      double spread = 0;
      for (int64_t i = 0; i < e; ++i) spread = std::max(spread, r.row.largest - r.logits[i]);
      EXPECT_TRUE(close(r.scores, expected, Bound{(16 + spread) * 0x1p-24, 0}));
      EXPECT_NEAR(ops.add_softmax_statistics(r.row, prob.as<float>()), entropy,
                  8 * 0x1p-24 * (1 + std::abs(lse)) + 16 * 0x1p-24 * entropy);
      EXPECT_TRUE(prob.same_bits(r.scores));
    }
  }
}

TEST_P(VectorOpsTest, SigmoidAndItsStatistics) {
  for (const int64_t e : kExperts) {
    for (const double stddev : {1.0, 12.0}) {
      PaddedRow r(e, rng, stddev);
      ops.describe(r.row);
      const float sum = ops.sigmoid(r.row);
      double exact_sum = 0, entropy = 0;
      Array scores(DType::kF32, {1, r.n}), complements(DType::kF32, {1, r.n}), prob = r.zeros;
      for (int64_t i = 0; i < r.n; ++i) {
        scores.set(i, 1 / (1 + std::exp(-r.logits[i])));
        complements.set(i, 1 / (1 + std::exp(r.logits[i])));
        exact_sum += 1 / (1 + std::exp(-r.logits[i]));
      }
      for (int64_t i = 0; i < e; ++i) {
        const double q = 1 / (1 + std::exp(-r.logits[i])) / exact_sum;
        entropy -= q * std::log(q);
      }
      EXPECT_TRUE(close(r.scores, scores, Bound{8 * 0x1p-24, 0}));
      EXPECT_TRUE(close(r.complements, complements, Bound{8 * 0x1p-24, 0}));
      EXPECT_NEAR(sum, exact_sum, 16 * 0x1p-24 * exact_sum);
      EXPECT_NEAR(ops.add_elementwise_statistics(r.row, sum, prob.as<float>()), entropy,
                  32 * 0x1p-24 * (1 + entropy));
    }
  }
}

// d_logits of the statistics by the chain rule in double.
TEST_P(VectorOpsTest, StatisticsBackward) {
  for (const int64_t e : kExperts) {
    for (const bool sigmoid : {false, true}) {
      PaddedRow r(e, rng, 1.5);
      Array d_prob = r.zeros, expected(DType::kF32, {1, r.n});
      for (int64_t i = 0; i < e; ++i) d_prob.set(i, std::sin(static_cast<double>(3 * i + 1)));
      const RouterGradient g = {d_prob.as<float>(), 0.8f, -0.6f, sigmoid ? 0.0f : 0.3f};
      ops.describe(r.row);
      std::vector<double> p, q, s;
      double q_sum = 0, mean = 0;
      for (int64_t i = 0; i < r.n; ++i) {
        p.push_back(std::exp(r.logits[i] - r.lse()));
        s.push_back(1 / (1 + std::exp(-r.logits[i])));
        q.push_back(sigmoid ? s.back() : p.back());
        q_sum += q.back();
      }
      const auto dq = [&](int64_t i) { return d_prob[i] - (i < e ? 0.8f * std::log(q[i]) : 0); };
      for (int64_t i = 0; i < r.n; ++i) q[i] /= q_sum;
      for (int64_t i = 0; i < e; ++i) mean += q[i] * dq(i);
      for (int64_t i = 0; i < r.n; ++i) {
        const double inner = sigmoid ? 1 - s[i] : 1;
        expected.set(i, q[i] * (dq(i) - mean) * inner + p[i] * (-0.6f - (sigmoid ? 0 : 0.3f)));
      }
      if (sigmoid) {
        const float sum = ops.sigmoid(r.row);
        ops.elementwise_backward(r.row, sum, g, r.out.as<float>());
      } else {
        ops.softmax(r.row);
        ops.softmax_backward(r.row, g, r.out.as<float>());
      }
      EXPECT_TRUE(close(r.out, expected, Bound{32 * 0x1p-24, 64 * 0x1p-24})) << e << sigmoid;
    }
  }
}

TEST_P(VectorOpsTest, F1_NonFiniteLogitsAreCountedAndStayVisible) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    PaddedRow r(21, rng, 1.0);
    r.logits.set(20, bad);
    EXPECT_EQ(ops.describe(r.row), r.n - 21 + 1);
    EXPECT_EQ(std::isnan(r.row.largest), std::isnan(bad));
    ops.softmax(r.row);
    for (int64_t i = 0; i < 21; ++i) {
      EXPECT_EQ(std::isnan(r.scores[i]), bad != -INFINITY) << i;
    }
    ops.sigmoid(r.row);
    for (int64_t i = 0; i < 20; ++i) EXPECT_TRUE(std::isfinite(r.scores[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, VectorOpsTest, ::testing::ValuesIn(available_sets()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dropless
