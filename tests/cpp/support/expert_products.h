// Owned operands of the experts' products, and their comparison with the reference, on whatever
// runs them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "dropless/experts.h"
#include "dropless/quantize.h"
#include "reference/activation.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/compare.h"
#include "tests/cpp/support/grouped_products.h"
#include "tests/cpp/support/groups.h"

namespace dropless::testing {

inline constexpr int64_t kPerToken = 3;

struct ExpertCase {
  DType dtype = DType::kF32;
  bool fp8_h = false;
  bool bias = false;
  bool transposed = false;
  ActivationOptions activation = {};
  ScaleRounding rounding = ScaleRounding::kFp32;
};

// Codes times scales as float32, of the shape of the codes; scales cover the last axis.
inline Array dequantized(const Array& q, const Array& scale) {
  Array x(DType::kF32, q.dims());
  const int64_t width = q.dims().back();
  for (int64_t i = 0; i < q.size(); ++i) {
    const int64_t row = i / width, col = i % width;
    x.set(i, q[i] * scale[row * ceil_div(width, kScaleBlock) + col / kScaleBlock]);
  }
  return x;
}

// Equal but for values so close to the middle of two codes that a last bit decided: at most one
// code apart. Neighbouring codes differ by up to an eighth of the value, and by 2^-9 scales near
// zero; scales follow the block's largest value, hence the second term.
inline ::testing::AssertionResult within_one_code(const Array& got, const Array& got_scale,
                                                  const Array& expected,
                                                  const Array& expected_scale) {
  const Array a = dequantized(got, got_scale), b = dequantized(expected, expected_scale);
  const int64_t width = got.dims().back();
  for (int64_t i = 0; i < a.size(); ++i) {
    const double scale =
        expected_scale[i / width * ceil_div(width, kScaleBlock) + i % width / kScaleBlock];
    const double step = std::max(std::abs(b[i]) / 8, scale * 0x1p-9);
    if (std::abs(a[i] - b[i]) <= step + 0x1p-6 * std::abs(b[i])) continue;
    return ::testing::AssertionFailure()
           << "element " << i << " of " << got.shape() << ": got " << a[i] << ", expected " << b[i];
  }
  return ::testing::AssertionSuccess();
}

inline DType h_dtype(const ExpertCase& c) {
  if (c.dtype == DType::kF32) return DType::kF32;
  return c.fp8_h ? DType::kF8E4M3 : DType::kBF16;
}

// Rows of `x` [M, P, I] as [M * P, I]: the comparison's stripes then never mix gate and up with
// tails.
inline Array flat(const Array& x) {
  Array y(x.dtype(), {x.dim(0) * x.dim(1), x.dim(2)});
  if (x.size() > 0) std::memcpy(y.view().data, x.view().data, x.view().bytes());
  return y;
}

struct Up {
  ExpertCase c;
  RoutedRows routing;
  Array x, x_scale, gate, up, gate_scale, up_scale, gate_bias, up_bias;
  int64_t rows, hidden;

  struct Out {
    Array h, h_scale, a, a_scale;
  };

  Up(const Groups& groups, int64_t width, int64_t hidden, const ExpertCase& c, Rng& rng)
      : c(c), routing(routed_rows(groups, kPerToken, rng)), rows(groups.rows()), hidden(hidden) {
    const int64_t e = groups.num_experts();
    const double stddev = 1 / std::sqrt(static_cast<double>(width));  // h is unit scale
    x = Array(c.dtype, {routing.tokens, width});
    fill_rows(x, rng, used_tokens(routing));
    const auto matrix = [&] {
      return normal(rng, c.dtype,
                    c.transposed ? std::vector<int64_t>{e, hidden, width}
                                 : std::vector<int64_t>{e, width, hidden},
                    stddev);
    };
    gate = matrix();
    if (c.activation.gated) up = matrix();
    if (c.dtype == DType::kF8E4M3) {
      const int64_t kb = ceil_div(width, kScaleBlock), nb = ceil_div(hidden, kScaleBlock);
      x_scale = scales(rng, {routing.tokens, kb}, used_tokens(routing));
      gate_scale = scales(rng, {e, c.transposed ? nb : kb, c.transposed ? kb : nb});
      if (c.activation.gated) up_scale = scales(rng, gate_scale.dims());
    }
    if (c.bias) {
      gate_bias = normal(rng, DType::kF32, {e, hidden});
      if (c.activation.gated) up_bias = normal(rng, DType::kF32, {e, hidden});
    }
  }

  Out poisoned() const {
    Out out;
    const int64_t parts = c.activation.parts();
    out.h = Array(h_dtype(c), {rows, parts, hidden});
    out.a = Array(c.dtype, {rows, hidden});
    const int64_t blocks = ceil_div(hidden, kScaleBlock);
    if (h_dtype(c) == DType::kF8E4M3) out.h_scale = Array(DType::kF32, {rows, parts, blocks});
    if (c.dtype == DType::kF8E4M3) out.a_scale = Array(DType::kF32, {rows, blocks});
    return out;
  }

  ExpertUpArgs args(const Out& out) const {
    ExpertUpArgs a;
    a.x = x, a.x_scale = x_scale;
    a.gate = gate, a.up = up, a.gate_scale = gate_scale, a.up_scale = up_scale;
    a.gate_bias = gate_bias, a.up_bias = up_bias;
    a.offsets = routing.offsets, a.slot_of_row = routing.slot_of_row;
    a.experts_per_token = kPerToken;
    a.weights_transposed = c.transposed;
    a.activation = c.activation;
    a.scale_rounding = c.rounding;
    a.h = out.h, a.h_scale = out.h_scale, a.a = out.a, a.a_scale = out.a_scale;
    return a;
  }
};

// Each runs the operation twice, by `run` and by `again_by`, which must give the same bits, and
// compares it with the reference.
template <class Run, class Again>
void expect_up(const Groups& groups, int64_t width, int64_t hidden, const ExpertCase& c, Rng& rng,
               const Run& run, const Again& again_by) {
  SCOPED_TRACE(groups.name + " " + name_of(c.dtype));
  const Up up(groups, width, hidden, c, rng);
  const Up::Out got = up.poisoned(), again = up.poisoned(), expected = up.poisoned();
  EXPECT_OK(run(up.args(got)));
  EXPECT_OK(again_by(up.args(again)));
  EXPECT_OK(reference::expert_up(up.args(expected)));
  EXPECT_TRUE(got.h.same_bits(again.h) && got.h_scale.same_bits(again.h_scale));
  EXPECT_TRUE(got.a.same_bits(again.a) && got.a_scale.same_bits(again.a_scale));

  // A belongs to h as it was rounded, however h is stored; so it is checked against an h that can
  // be read back: its own rounding, and 8 fp32 roundings of the activation.
  Up::Out plain = got, expected_plain = expected;
  if (got.h.dtype() == DType::kF8E4M3) {
    EXPECT_TRUE(within_one_code(flat(got.h), got.h_scale, flat(expected.h), expected.h_scale));
    Up same = up;
    same.c.fp8_h = false;
    plain = same.poisoned();
    EXPECT_OK(again_by(same.args(plain)));
    EXPECT_TRUE(plain.a.same_bits(got.a)) << "A depends on how h is stored";
    expected_plain = same.poisoned();
    EXPECT_OK(reference::expert_up(same.args(expected_plain)));
  }
  const Array& h = plain.h;
  EXPECT_TRUE(close(flat(h), flat(expected_plain.h), rounded_to(h.dtype()) + fp32_sum(width)));
  Array a(DType::kF32, {up.rows, hidden});
  a.fill(0);
  const std::vector<int32_t> offsets = groups.offsets();
  for (int64_t i = offsets.front() * hidden; i < offsets.back() * hidden; ++i) {
    const int64_t row = i / hidden * c.activation.parts(), col = i % hidden;
    const double h_up = c.activation.gated ? h[(row + 1) * hidden + col] : 0;
    a.set(i, reference::glu(c.activation, h[row * hidden + col], h_up).a);
  }
  if (c.dtype == DType::kF8E4M3) {
    const Up::Out codes = up.poisoned();
    EXPECT_OK(reference::quantize_rows({a, c.rounding, codes.a, codes.a_scale}));
    EXPECT_TRUE(within_one_code(got.a, got.a_scale, codes.a, codes.a_scale));
  } else {
    EXPECT_TRUE(close(got.a, a, rounded_to(c.dtype) + Bound{8 * 0x1p-24, 0x1p-24}));
  }
  EXPECT_TRUE(rows_are_zero(got.a, 0, offsets.front()));
  EXPECT_TRUE(rows_are_zero(got.h, offsets.back(), up.rows));
}

struct Down {
  ExpertCase c;
  RoutedRows routing;
  Array dy, dy_scale, down, down_scale, bias, h, h_scale, weights;
  int64_t rows, hidden;

  struct Out {
    Array dh, dh_q, dh_scale, pa, d_weights;
  };

  Down(const Groups& groups, int64_t width, int64_t hidden, const ExpertCase& c, Rng& rng)
      : c(c), routing(routed_rows(groups, kPerToken, rng)), rows(groups.rows()), hidden(hidden) {
    const int64_t e = groups.num_experts();
    const int64_t kb = ceil_div(width, kScaleBlock), nb = ceil_div(hidden, kScaleBlock);
    dy = Array(c.dtype, {routing.tokens, width});
    fill_rows(dy, rng, used_tokens(routing));
    down = normal(rng, c.dtype, {e, hidden, width}, 1 / std::sqrt(static_cast<double>(width)));
    if (c.dtype == DType::kF8E4M3) {
      dy_scale = scales(rng, {routing.tokens, kb}, used_tokens(routing));
      down_scale = scales(rng, {e, nb, kb});
    }
    if (c.bias) bias = normal(rng, DType::kF32, {e, width});
    const int64_t parts = c.activation.parts();
    h = Array(h_dtype(c), {rows, parts, hidden});
    fill_rows(h, rng, used_rows(groups));
    if (h_dtype(c) == DType::kF8E4M3) h_scale = scales(rng, {rows, parts, nb}, used_rows(groups));
    weights = normal(rng, DType::kF32, {routing.tokens, kPerToken});
  }

  Out poisoned() const {
    const DType result = c.dtype == DType::kF32 ? DType::kF32 : DType::kBF16;
    const int64_t parts = c.activation.parts();
    Out out;
    out.dh = Array(result, {rows, parts, hidden});
    out.pa = Array(result, {rows, hidden});
    out.d_weights = Array(DType::kF32, weights.dims());
    if (c.dtype == DType::kF8E4M3) {
      out.dh_q = Array(DType::kF8E4M3, {rows, parts, hidden});
      out.dh_scale = Array(DType::kF32, {rows, parts, ceil_div(hidden, kScaleBlock)});
    }
    return out;
  }

  ExpertDownBackwardArgs args(const Out& out) const {
    ExpertDownBackwardArgs a;
    a.dy = dy, a.dy_scale = dy_scale, a.down = down, a.down_scale = down_scale, a.down_bias = bias;
    a.h = h, a.h_scale = h_scale, a.weights = weights;
    a.offsets = routing.offsets, a.slot_of_row = routing.slot_of_row;
    a.activation = c.activation;
    a.scale_rounding = c.rounding;
    a.dh = out.dh, a.dh_q = out.dh_q, a.dh_scale = out.dh_scale, a.pa = out.pa;
    a.d_weights = out.d_weights;
    return a;
  }
};

template <class Run, class Again>
void expect_down_backward(const Groups& groups, int64_t width, int64_t hidden, const ExpertCase& c,
                          Rng& rng, const Run& run, const Again& again_by) {
  SCOPED_TRACE(groups.name + " " + name_of(c.dtype));
  const Down down(groups, width, hidden, c, rng);
  const Down::Out got = down.poisoned(), again = down.poisoned(), expected = down.poisoned();
  EXPECT_OK(run(down.args(got)));
  EXPECT_OK(again_by(down.args(again)));
  EXPECT_OK(reference::expert_down_backward(down.args(expected)));
  EXPECT_TRUE(got.dh.same_bits(again.dh) && got.dh_q.same_bits(again.dh_q));
  EXPECT_TRUE(got.dh_scale.same_bits(again.dh_scale) && got.pa.same_bits(again.pa));
  EXPECT_TRUE(got.d_weights.same_bits(again.d_weights)) << "two runs differ";

  // The product's error times activation factors that reach 5 RMS, and 8 roundings of the
  // activation.
  const DType result = got.dh.dtype();
  const Bound fp32 = Bound{8 * 0x1p-24, 0x1p-22} + fp32_sum(25 * width);
  EXPECT_TRUE(close(flat(got.dh), flat(expected.dh), rounded_to(result) + fp32));
  EXPECT_TRUE(close(got.pa, expected.pa, rounded_to(result) + fp32));
  EXPECT_TRUE(close(got.d_weights, expected.d_weights, fp32 + fp32_sum(25 * (width + hidden))));
  if (c.dtype == DType::kF8E4M3) {
    EXPECT_TRUE(
        within_one_code(flat(got.dh_q), got.dh_scale, flat(expected.dh_q), expected.dh_scale));
  }
  const std::vector<int32_t> offsets = groups.offsets();
  EXPECT_TRUE(rows_are_zero(got.dh, 0, offsets.front()));
  EXPECT_TRUE(rows_are_zero(got.pa, offsets.back(), down.rows));
}

struct UpBackward {
  Array dh, dh_scale, gate, up, gate_scale, up_scale, offsets;
  DType result;

  UpBackward(const Groups& groups, int64_t width, int64_t hidden, DType dtype, Rng& rng,
             bool gated = true)
      : offsets(ints(groups.offsets())), result(dtype == DType::kF32 ? DType::kF32 : DType::kBF16) {
    const int64_t e = groups.num_experts(), parts = gated ? 2 : 1;
    dh = Array(dtype, {groups.rows(), parts, hidden});
    fill_rows(dh, rng, used_rows(groups));
    gate = normal(rng, dtype, {e, width, hidden});
    if (gated) up = normal(rng, dtype, {e, width, hidden});
    if (dtype == DType::kF8E4M3) {
      const int64_t kb = ceil_div(hidden, kScaleBlock), nb = ceil_div(width, kScaleBlock);
      dh_scale = scales(rng, {groups.rows(), parts, kb}, used_rows(groups));
      gate_scale = scales(rng, {e, nb, kb});
      if (gated) up_scale = scales(rng, {e, nb, kb});
    }
  }
  Array poisoned() const { return Array(result, {dh.dim(0), gate.dim(1)}); }
  ExpertUpBackwardArgs args(const Array& out) const {
    return {dh, dh_scale, gate, up, gate_scale, up_scale, offsets, out};
  }
};

template <class Run, class Again>
void expect_up_backward(const Groups& groups, int64_t width, int64_t hidden, DType dtype,
                        bool gated, Rng& rng, const Run& run, const Again& again_by) {
  const UpBackward op(groups, width, hidden, dtype, rng, gated);
  const Array got = op.poisoned(), again = op.poisoned(), expected = op.poisoned();
  EXPECT_OK(run(op.args(got)));
  EXPECT_OK(again_by(op.args(again)));
  EXPECT_OK(reference::expert_up_backward(op.args(expected)));
  EXPECT_TRUE(close(got, expected, rounded_to(op.result) + fp32_sum(2 * hidden), groups.offsets()))
      << groups.name << " " << name_of(dtype);
  EXPECT_TRUE(got.same_bits(again)) << "two runs differ";
}

}  // namespace dropless::testing
