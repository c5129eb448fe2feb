// What the reference experts round, and to what, with bfloat16 and FP8 operands.
#include <gtest/gtest.h>

#include <cmath>

#include "dropless/experts.h"
#include "dropless/quantize.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/groups.h"

namespace dropless {
namespace {

using namespace dropless::testing;

constexpr int64_t kPerToken = 2, kH = 140, kI = 133;  // two scale blocks each, neither full

struct Fp8 {
  Array q, scale;
};

Fp8 quantized_rows(const Array& x) {
  Fp8 r{Array(DType::kF8E4M3, {x.dim(0), x.dim(1)}),
        Array(DType::kF32, {x.dim(0), ceil_div(x.dim(1), 128)})};
  EXPECT_OK(reference::quantize_rows({x, ScaleRounding::kFp32, r.q, r.scale}));
  return r;
}

// A weight in the orientation in which the product over its first (transposed: second) axis reads
// it.
Fp8 quantized_weight(const Array& w, bool transposed) {
  const int64_t e = w.dim(0), in = w.dim(1), out = w.dim(2);
  Fp8 q{Array(DType::kF8E4M3, {e, in, out}),
        Array(DType::kF32, {e, ceil_div(in, 128), ceil_div(out, 128)})};
  Fp8 t{Array(DType::kF8E4M3, {e, out, in}),
        Array(DType::kF32, {e, ceil_div(out, 128), ceil_div(in, 128)})};
  EXPECT_OK(reference::quantize_weight({w, ScaleRounding::kFp32, q.q, t.q, q.scale, t.scale}));
  return transposed ? std::move(t) : std::move(q);
}

double silu(double z) { return z / (1 + std::exp(-z)); }
double silu_slope(double z) {
  const double s = 1 / (1 + std::exp(-z));
  return s + z * s * (1 - s);
}

class ExpertPrecision : public ::testing::Test {
 protected:
  ExpertPrecision()
      : groups{"mixed", {7, 0, 5}, 2, 3},
        routed(routed_rows(groups, kPerToken, rng)),
        rows(groups.rows()) {}

  // Unit-scale pre-activations: weights are scaled by 1/sqrt(H).
  Array weight(DType dtype, int64_t in, int64_t out) {
    return normal(rng, dtype, {3, in, out}, 1 / std::sqrt(static_cast<double>(in)));
  }
  int32_t slot_of(int64_t row) const { return routed.slot_of_row.as<int32_t>()[row]; }

  Rng rng{81};
  Groups groups;
  RoutedRows routed;
  int64_t rows;
};

TEST_F(ExpertPrecision, Bf16ActivationIsComputedFromRoundedH) {
  const Array x = normal(rng, DType::kBF16, {routed.tokens, kH});
  const Array gate = weight(DType::kBF16, kH, kI), up = weight(DType::kBF16, kH, kI);
  Array h(DType::kBF16, {rows, 2, kI}), a(DType::kBF16, {rows, kI});
  ExpertUpArgs args{};
  args.x = x, args.gate = gate, args.up = up, args.h = h, args.a = a;
  args.offsets = routed.offsets, args.slot_of_row = routed.slot_of_row;
  args.experts_per_token = kPerToken;
  EXPECT_OK(reference::expert_up(args));
  Array expected(DType::kBF16, {rows, kI});
  for (int64_t i = 0; i < expected.size(); ++i) {
    const int64_t row = i / kI;
    expected.set(i, silu(h[row * 2 * kI + i % kI]) * h[(row * 2 + 1) * kI + i % kI]);
  }
  EXPECT_TRUE(a.same_bits(expected));
  for (const Array* out : {&h, &a}) {
    EXPECT_TRUE(rows_are_zero(*out, 0, 2));
    EXPECT_TRUE(rows_are_zero(*out, 14, 17));
  }
}

TEST_F(ExpertPrecision, Fp8ForwardDequantisesExactlyAndQuantisesTheFp32Product) {
  const Fp8 x = quantized_rows(normal(rng, DType::kF32, {routed.tokens, kH}));
  for (const bool transposed : {false, true}) {
    const Fp8 gate = quantized_weight(weight(DType::kF32, kH, kI), transposed);
    const Fp8 up = quantized_weight(weight(DType::kF32, kH, kI), transposed);
    Array h(DType::kBF16, {rows, 2, kI}), a(DType::kF8E4M3, {rows, kI});
    Array a_scale(DType::kF32, {rows, 2});
    ExpertUpArgs args{};
    args.x = x.q, args.x_scale = x.scale, args.gate = gate.q, args.gate_scale = gate.scale;
    args.up = up.q, args.up_scale = up.scale, args.offsets = routed.offsets;
    args.slot_of_row = routed.slot_of_row, args.experts_per_token = kPerToken;
    args.weights_transposed = transposed;
    args.h = h, args.a = a, args.a_scale = a_scale;
    EXPECT_OK(reference::expert_up(args));

    Array naive(DType::kF32, {rows, 2, kI}), product(DType::kF32, {rows, kI});
    naive.fill(0);
    const std::vector<int32_t> offsets = groups.offsets();
    for (int64_t e = 0; e < 3; ++e) {
      for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
        const int64_t t = slot_of(row) / kPerToken;
        for (int64_t i = 0; i < 2 * kI; ++i) {
          const Fp8& w = i < kI ? gate : up;
          double sum = 0;
          for (int64_t k = 0; k < kH; ++k) {
            const int64_t c = i % kI;
            const int64_t at = transposed ? (e * kI + c) * kH + k : (e * kH + k) * kI + c;
            const int64_t block =
                (e * 2 + (transposed ? c : k) / 128) * 2 + (transposed ? k : c) / 128;
            sum += x.q[t * kH + k] * x.scale[t * 2 + k / 128] * w.q[at] * w.scale[block];
          }
          naive.set(row * 2 * kI + i, sum);
        }
      }
    }
    EXPECT_TRUE(close(h, naive, rounded_to(DType::kBF16), offsets));
    for (int64_t i = 0; i < product.size(); ++i) {
      const int64_t row = i / kI, c = i % kI;
      product.set(i, silu(h[row * 2 * kI + c]) * h[(row * 2 + 1) * kI + c]);
    }
    const Fp8 expected = quantized_rows(product);
    EXPECT_TRUE(a.same_bits(expected.q));
    EXPECT_TRUE(a_scale.same_bits(expected.scale));
    EXPECT_TRUE(rows_are_zero(a, 0, 2));
    EXPECT_TRUE(rows_are_zero(a, 14, 17));

    // Storing h in FP8, or not at all, changes nothing in A.
    Array h_q(DType::kF8E4M3, {rows, 2, kI}), h_scale(DType::kF32, {rows, 2, 2});
    Array a2 = a, a2_scale = a_scale, a3 = a, a3_scale = a_scale;
    a2.poison(), a3.poison();
    args.h = h_q, args.h_scale = h_scale, args.a = a2, args.a_scale = a2_scale;
    EXPECT_OK(reference::expert_up(args));
    EXPECT_TRUE(a2.same_bits(a));
    Array dequantized(DType::kF32, {rows, 2, kI});
    for (int64_t i = 0; i < h_q.size(); ++i) {
      dequantized.set(i, h_q[i] * h_scale[i / kI * 2 + i % kI / 128]);
    }
    EXPECT_TRUE(close(dequantized, naive, Bound{0x1p-4, 0x1p-8}));
    args.h = Tensor(), args.h_scale = Tensor(), args.a = a3, args.a_scale = a3_scale;
    EXPECT_OK(reference::expert_up(args));
    EXPECT_TRUE(a3.same_bits(a));
  }
}

TEST_F(ExpertPrecision, Fp8BackwardAgainstDefinition) {
  const Fp8 dy = quantized_rows(normal(rng, DType::kF32, {routed.tokens, kH}));
  const Fp8 down = quantized_weight(weight(DType::kF32, kI, kH), false);
  const Array weights = normal(rng, DType::kF32, {routed.tokens, kPerToken});
  const Array h = normal(rng, DType::kBF16, {rows, 2, kI});
  Array h_rows(DType::kF32, {rows * 2, kI});
  for (int64_t i = 0; i < h.size(); ++i) h_rows.set(i, h[i]);
  const Fp8 h_fp8 = quantized_rows(h_rows);
  for (const bool saved_in_fp8 : {false, true}) {
    Tensor h_q = h_fp8.q, h_scale = h_fp8.scale;
    h_q.rank = h_scale.rank = 3;
    h_q.dims[0] = h_scale.dims[0] = rows, h_q.dims[1] = h_scale.dims[1] = 2;
    h_q.dims[2] = kI, h_scale.dims[2] = 2;
    Array dh(DType::kBF16, {rows, 2, kI}), dh_q(DType::kF8E4M3, {rows, 2, kI});
    Array dh_scale(DType::kF32, {rows, 2, 2}), pa(DType::kBF16, {rows, kI});
    Array d_weights(DType::kF32, {routed.tokens, kPerToken});
    ExpertDownBackwardArgs args{};
    args.dy = dy.q, args.dy_scale = dy.scale, args.down = down.q, args.down_scale = down.scale;
    if (saved_in_fp8) {
      args.h = h_q, args.h_scale = h_scale;
    } else {
      args.h = h;
    }
    args.weights = weights, args.offsets = routed.offsets, args.slot_of_row = routed.slot_of_row;
    args.dh = dh, args.dh_q = dh_q, args.dh_scale = dh_scale, args.pa = pa;
    args.d_weights = d_weights;
    EXPECT_OK(reference::expert_down_backward(args));

    Array naive_dh(DType::kF32, {rows, 2, kI}), naive_pa(DType::kF32, {rows, kI});
    Array naive_d_weights = d_weights;
    naive_dh.fill(0), naive_pa.fill(0), naive_d_weights.fill(0);
    const std::vector<int32_t> offsets = groups.offsets();
    for (int64_t e = 0; e < 3; ++e) {
      for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
        const int64_t slot = slot_of(row), t = slot / kPerToken;
        double d_weight = 0;
        for (int64_t i = 0; i < kI; ++i) {
          double da = 0;
          for (int64_t k = 0; k < kH; ++k) {
            da += dy.q[t * kH + k] * dy.scale[t * 2 + k / 128] * down.q[(e * kI + i) * kH + k] *
                  down.scale[(e * 2 + i / 128) * 2 + k / 128];
          }
          const int64_t g_at = row * 2 * kI + i, u_at = g_at + kI;
          const auto saved = [&](int64_t at) {
            return saved_in_fp8 ? h_fp8.q[at] * h_fp8.scale[at / kI * 2 + at % kI / 128] : h[at];
          };
          const double g = saved(g_at), u = saved(u_at);
          naive_dh.set(g_at, weights[slot] * da * u * silu_slope(g));
          naive_dh.set(u_at, weights[slot] * da * silu(g));
          naive_pa.set(row * kI + i, weights[slot] * silu(g) * u);
          d_weight += da * silu(g) * u;
        }
        naive_d_weights.set(slot, d_weight);
      }
    }
    EXPECT_TRUE(close(dh, naive_dh, rounded_to(DType::kBF16), offsets));
    EXPECT_TRUE(close(pa, naive_pa, rounded_to(DType::kBF16), offsets));
    EXPECT_TRUE(close(d_weights, naive_d_weights, rounded_to(DType::kF32)));
    // Codes come from the fp32 values, not from the bfloat16 ones: a code may differ from those of
    // naive_dh (float32) only where double and float32 round differently, which these data do not
    // have.
    Array flat(DType::kF32, {rows * 2, kI});
    for (int64_t i = 0; i < flat.size(); ++i) flat.set(i, naive_dh[i]);
    const Fp8 expected = quantized_rows(flat);
    for (int64_t i = 0; i < dh_q.size(); ++i) {
      ASSERT_EQ(dh_q.as<uint8_t>()[i], expected.q.as<uint8_t>()[i]) << i;
    }
    for (const Array* out : {&dh, &dh_q, &pa}) {
      EXPECT_TRUE(rows_are_zero(*out, 0, 2));
      EXPECT_TRUE(rows_are_zero(*out, 14, 17));
    }
    EXPECT_TRUE(all_finite(dh_scale));
  }
}

TEST_F(ExpertPrecision, A9_GateAndUpEachGiveTheirPartOfDx) {
  const Array dh = normal(rng, DType::kBF16, {rows, 2, kI});
  Array gate = weight(DType::kBF16, kH, kI), up = weight(DType::kBF16, kH, kI), zero = gate;
  zero.fill(0);
  const auto dx = [&](const Array& g, const Array& u) {
    Array out(DType::kBF16, {rows, kH});
    EXPECT_OK(reference::expert_up_backward({dh, {}, g, u, {}, {}, routed.offsets, out}));
    return out;
  };
  const Array by_gate = dx(gate, zero), by_up = dx(zero, up), both = dx(gate, up);
  Array sum(DType::kF32, {rows, kH});
  for (int64_t i = 0; i < sum.size(); ++i) sum.set(i, by_gate[i] + by_up[i]);
  // Three roundings to bfloat16, of numbers no larger than a few RMS.
  EXPECT_TRUE(close(both, sum, Bound{0, 8 * 0x1p-8}));
  EXPECT_FALSE(close(by_gate, sum, Bound{0, 8 * 0x1p-8}));
}

TEST_F(ExpertPrecision, Fp8UpBackwardAgainstDefinition) {
  Array dh_rows = normal(rng, DType::kF32, {rows * 2, kI});
  const Fp8 dh = quantized_rows(dh_rows);
  const Fp8 gate = quantized_weight(weight(DType::kF32, kH, kI), false);
  const Fp8 up = quantized_weight(weight(DType::kF32, kH, kI), false);
  Tensor dh_q = dh.q, dh_scale = dh.scale;
  dh_q.rank = dh_scale.rank = 3;
  dh_q.dims[0] = dh_scale.dims[0] = rows, dh_q.dims[1] = dh_scale.dims[1] = 2;
  dh_q.dims[2] = kI, dh_scale.dims[2] = 2;
  Array got(DType::kBF16, {rows, kH}), naive(DType::kF32, {rows, kH});
  EXPECT_OK(reference::expert_up_backward(
      {dh_q, dh_scale, gate.q, up.q, gate.scale, up.scale, routed.offsets, got}));
  naive.fill(0);
  const std::vector<int32_t> offsets = groups.offsets();
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t i = offsets[e] * kH; i < offsets[e + 1] * kH; ++i) {
      const int64_t row = i / kH, k = i % kH;
      double sum = 0;
      for (int64_t j = 0; j < 2 * kI; ++j) {
        const Fp8& w = j < kI ? gate : up;
        const int64_t c = j % kI, r = row * 2 + j / kI;
        sum += dh.q[r * kI + c] * dh.scale[r * 2 + c / 128] * w.q[(e * kH + k) * kI + c] *
               w.scale[(e * 2 + k / 128) * 2 + c / 128];
      }
      naive.set(i, sum);
    }
  }
  EXPECT_TRUE(close(got, naive, rounded_to(DType::kBF16), offsets));
}

}  // namespace
}  // namespace dropless
