// Defines kVectorOps for the instruction set that the including file is compiled for. Unnamed
// namespace, no standard library: see gemm_kernel.h.
#pragma once

#include "cpu/vector_math.h"
#include "cpu/vector_ops.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

// ---- Rows of float32 or bfloat16

struct F32 {
  using Element = float;
  static DROPLESS_INLINE VF read(const float* p) { return load<VF>(p); }
  static DROPLESS_INLINE VF read(const float* p, int64_t n) { return load_some<VF>(p, n); }
  static DROPLESS_INLINE void write(float* p, VF v) { store(p, v); }
  static DROPLESS_INLINE void write_streaming(float* p, VF v) { stream(p, v); }
  static DROPLESS_INLINE void write(float* p, VF v, int64_t n) { store_some(p, v, n); }
};

struct Bf16 {
  using Element = uint16_t;
  static DROPLESS_INLINE VF read(const uint16_t* p) { return widen_bf16(load<VH>(p)); }
  static DROPLESS_INLINE VF read(const uint16_t* p, int64_t n) {
    return widen_bf16(load_some<VH>(p, n));
  }
  static DROPLESS_INLINE void write(uint16_t* p, VF v) { store(p, narrow_bf16(v)); }
  static DROPLESS_INLINE void write_streaming(uint16_t* p, VF v) { stream(p, narrow_bf16(v)); }
  static DROPLESS_INLINE void write(uint16_t* p, VF v, int64_t n) {
    store_some(p, narrow_bf16(v), n);
  }
};

template <class Row, class Out, bool kStreaming>
void weighted_sum_as(const void* const* rows, const float* weights, int64_t count, int64_t n,
                     void* out) {
  using Source = const typename Row::Element*;
  auto* y = static_cast<typename Out::Element*>(out);
  int64_t i = 0;
  // Whole cache lines of a row before the next row's.
  constexpr int kAtOnce = 4;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes) {
    VF totals[kAtOnce] = {};
    for (int64_t k = 0; k < count; ++k) {
      const VF weight = splat(weights[k]);
      const auto* row = static_cast<Source>(rows[k]) + i;
#pragma GCC unroll 4
      for (int v = 0; v < kAtOnce; ++v) {
        totals[v] = fma(weight, Row::read(row + v * kLanes), totals[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kAtOnce; ++v) {
      if constexpr (kStreaming) {
        Out::write_streaming(y + i + v * kLanes, totals[v]);
      } else {
        Out::write(y + i + v * kLanes, totals[v]);
      }
    }
  }
  if constexpr (kStreaming) end_streams();
  for (; i + kLanes <= n; i += kLanes) {
    VF total{};
    for (int64_t k = 0; k < count; ++k) {
      total = fma(splat(weights[k]), Row::read(static_cast<Source>(rows[k]) + i), total);
    }
    Out::write(y + i, total);
  }
  if (i == n) return;
  VF total{};
  for (int64_t k = 0; k < count; ++k) {
    total = fma(splat(weights[k]), Row::read(static_cast<Source>(rows[k]) + i, n - i), total);
  }
  Out::write(y + i, total, n - i);
}

template <class Row, class Out>
void weighted_sum_to(const void* const* rows, const float* weights, int64_t count, int64_t n,
                     void* out, bool streaming) {
  // Vectors that reach into a line of another call would be written twice.
  if (streaming && reinterpret_cast<uintptr_t>(out) % 64 == 0) {
    return weighted_sum_as<Row, Out, true>(rows, weights, count, n, out);
  }
  weighted_sum_as<Row, Out, false>(rows, weights, count, n, out);
}

void weighted_sum(const void* const* rows, const float* weights, int64_t count, bool rows_bf16,
                  int64_t n, void* out, bool out_bf16, bool streaming) {
  if (rows_bf16) {
    return out_bf16 ? weighted_sum_to<Bf16, Bf16>(rows, weights, count, n, out, streaming)
                    : weighted_sum_to<Bf16, F32>(rows, weights, count, n, out, streaming);
  }
  return out_bf16 ? weighted_sum_to<F32, Bf16>(rows, weights, count, n, out, streaming)
                  : weighted_sum_to<F32, F32>(rows, weights, count, n, out, streaming);
}

template <class Dy, class Row>
float scale_and_dot_as(const void* dy, const void* row, float weight, int64_t n, void* d_row) {
  const auto* g = static_cast<const typename Dy::Element*>(dy);
  const auto* x = static_cast<const typename Row::Element*>(row);
  auto* d = static_cast<typename Row::Element*>(d_row);
  VF total{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VF v = Dy::read(g + i);
    total = fma(v, Row::read(x + i), total);
    Row::write(d + i, v * weight);
  }
  if (i < n) {
    const VF v = Dy::read(g + i, n - i);
    total = fma(v, Row::read(x + i, n - i), total);
    Row::write(d + i, v * weight, n - i);
  }
  return sum(total);
}

float scale_and_dot(const void* dy, bool dy_bf16, const void* row, bool rows_bf16, float weight,
                    int64_t n, void* d_row) {
  if (dy_bf16) {
    return rows_bf16 ? scale_and_dot_as<Bf16, Bf16>(dy, row, weight, n, d_row)
                     : scale_and_dot_as<Bf16, F32>(dy, row, weight, n, d_row);
  }
  return rows_bf16 ? scale_and_dot_as<F32, Bf16>(dy, row, weight, n, d_row)
                   : scale_and_dot_as<F32, F32>(dy, row, weight, n, d_row);
}

template <class X>
void accumulate_as(const void* x, float weight, int64_t n, float* sum) {
  const auto* v = static_cast<const typename X::Element*>(x);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(sum + i, fma(X::read(v + i), weight, load<VF>(sum + i)));
  }
  if (i < n) {
    const VF total = fma(X::read(v + i, n - i), weight, load_some<VF>(sum + i, n - i));
    store_some(sum + i, total, n - i);
  }
}

void accumulate(const void* x, bool x_bf16, float weight, int64_t n, float* sum) {
  return x_bf16 ? accumulate_as<Bf16>(x, weight, n, sum) : accumulate_as<F32>(x, weight, n, sum);
}

// ---- Router rows

// exp for x <= 0: 0 for what exp clamps, NaN for NaN.
DROPLESS_INLINE VF exp_or_zero(VF x) {
  const VF y = x < -87.0f ? VF{} : exp(x);
  return x == x ? y : x;
}

// Natural logarithm of normal positive numbers, to about 1 ulp: x = 2^k * m with m in [sqrt(1/2),
// sqrt(2)], and the minimax polynomial of Cephes for log(1 + f) with f = m - 1.
DROPLESS_INLINE VF log(VF x) {
  const VU u = bits(x) - bits(splat(0.70710678118654752f));
  const VF k = __builtin_convertvector((VI)u >> 23, VF);
  const VF f = floats((u & 0x7fffffu) + bits(splat(0.70710678118654752f))) - 1.0f;
  const VF square = f * f;
  VF p = fma(splat(7.0376836292e-2f), f, -1.1514610310e-1f);
  p = fma(p, f, 1.1676998740e-1f);
  p = fma(p, f, -1.2420140846e-1f);
  p = fma(p, f, 1.4249322787e-1f);
  p = fma(p, f, -1.6668057665e-1f);
  p = fma(p, f, 2.0000714765e-1f);
  p = fma(p, f, -2.4999993993e-1f);
  p = fma(p, f, 3.3333331174e-1f);
  // ln 2 in two parts: the first is exact times any exponent.
  VF y = fma(k, -2.12194440e-4f, p * f * square);
  y = fma(square, -0.5f, y);
  return fma(k, 0.693359375f, f + y);
}

float log_of(float x) {
  float lane[kLanes];
  store(lane, log(splat(x)));
  return x == x ? lane[0] : x;
}

int64_t describe(RouterRow& row) {
  VF best = splat(-__builtin_inff());
  VF nan{};
  VI non_finite{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF z = load<VF>(row.logits + i);
    best = z > best ? z : best;
    nan = z == z ? nan : z;
    non_finite -= (bits(z) & 0x7fffffffu) >= 0x7f800000u;  // true is -1
  }
  float lane[kLanes];
  store(lane, nan);
  row.largest = cpu::largest(best);
  for (int i = 0; i < kLanes; ++i) row.largest = lane[i] != lane[i] ? lane[i] : row.largest;
  int32_t count[kLanes];
  store(count, non_finite);
  int64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += count[i];
  if (__builtin_isinf(row.largest)) {
    row.lse = row.largest;
    return total;
  }
  VF exponentials{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    exponentials += exp_or_zero(load<VF>(row.logits + i) - row.largest);
  }
  row.lse = row.largest + log_of(sum(exponentials));
  return total;
}

void softmax(const RouterRow& row) {
  VF exponentials{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF e = exp_or_zero(load<VF>(row.logits + i) - row.largest);
    store(row.scores + i, e);
    exponentials += e;
  }
  const VF total = splat(sum(exponentials));
  for (int64_t i = 0; i < row.n; i += kLanes) {
    store(row.scores + i, load<VF>(row.scores + i) / total);
  }
}

// router::kScoreIsExp, whose header this file may not include.
constexpr float kScoreIsExp = -20.0f;

// Of a row whose logits are all so low that scores are exp(rate * z).
float exponential_scores(const RouterRow& row, float rate) {
  VF total{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF score = exp_or_zero(rate * (load<VF>(row.logits + i) - row.largest));
    store(row.scores + i, score);
    store(row.slopes + i, splat(rate));
    total += score;
  }
  return sum(total);
}

float sigmoid(const RouterRow& row) {
  if (row.largest < kScoreIsExp) return exponential_scores(row, 1.0f);
  VF total{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF z = load<VF>(row.logits + i);
    const VF e = exp_or_zero(z > 0.0f ? -z : z);
    const VF large = 1.0f / (1.0f + e), small = e / (1.0f + e);
    const VF score = z > 0.0f ? large : small;
    store(row.scores + i, score);
    store(row.slopes + i, z > 0.0f ? small : large);
    total += score;
  }
  return sum(total);
}

DROPLESS_INLINE VF sqrt(VF x) {
  float lane[kLanes];
  store(lane, x);
  for (int i = 0; i < kLanes; ++i) lane[i] = __builtin_sqrtf(lane[i]);
  return load<VF>(lane);
}

// log(1 + e) / e for e from 0 to 1, as router::log1p_over.
DROPLESS_INLINE VF log1p_over(VF e) {
  const VF u = e / (2.0f + e);
  const VF u2 = u * u;
  VF p = fma(splat(1.0f / 17), u2, 1.0f / 15);
  p = fma(p, u2, 1.0f / 13);
  p = fma(p, u2, 1.0f / 11);
  p = fma(p, u2, 1.0f / 9);
  p = fma(p, u2, 1.0f / 7);
  p = fma(p, u2, 1.0f / 5);
  p = fma(p, u2, 1.0f / 3);
  p = fma(p, u2, 1.0f);
  return 2.0f * p / (2.0f + e);
}

float sqrt_softplus(const RouterRow& row) {
  if (row.largest < kScoreIsExp) return exponential_scores(row, 0.5f);
  VF total{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF z = load<VF>(row.logits + i);
    const VF e = exp_or_zero(z > 0.0f ? -z : z);
    const VF softplus = fma(e, log1p_over(e), z > 0.0f ? z : VF{});
    const VF sigmoid = (z > 0.0f ? splat(1.0f) : e) / (1.0f + e);
    const VF score = z < kScoreIsExp ? exp_or_zero(0.5f * z) : sqrt(softplus);
    store(row.scores + i, score);
    store(row.slopes + i, z < kScoreIsExp ? splat(0.5f) : 0.5f * sigmoid / softplus);
    total += score;
  }
  return sum(total);
}

float add_softmax_statistics(const RouterRow& row, float* prob_sum) {
  // -sum q log q with log q = z - lse; q = 0 adds nothing, its limit.
  VF entropy{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF q = load<VF>(row.scores + i);
    store(prob_sum + i, load<VF>(prob_sum + i) + q);
    const VF term = q * (row.lse - load<VF>(row.logits + i));
    entropy += q == 0.0f ? VF{} : term;
  }
  return sum(entropy);
}

float add_elementwise_statistics(const RouterRow& row, float scores_sum, float* prob_sum) {
  VF entropy{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF q = load<VF>(row.scores + i) / scores_sum;
    store(prob_sum + i, load<VF>(prob_sum + i) + q);
    entropy -= q == 0.0f ? VF{} : q * log(q);
  }
  return sum(entropy);
}

void softmax_backward(const RouterRow& row, const RouterGradient& g, float* d_logits) {
  VF mean{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF q = load<VF>(row.scores + i);
    // d(entropy)/dq = -log q, up to a constant that the mean takes away.
    const VF slope = g.d_entropy * (row.lse - load<VF>(row.logits + i));
    const VF dq = load<VF>(g.d_prob + i) + (q == 0.0f ? VF{} : slope);
    store(d_logits + i, dq);
    mean = fma(dq, q, mean);
  }
  const VF shift = splat(g.d_lse - g.d_scores_sum - sum(mean));
  for (int64_t i = 0; i < row.n; i += kLanes) {
    store(d_logits + i, load<VF>(row.scores + i) * (load<VF>(d_logits + i) + shift));
  }
}

void elementwise_backward(const RouterRow& row, float scores_sum, const RouterGradient& g,
                          float* d_logits) {
  VF mean{};
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF q = load<VF>(row.scores + i) / scores_sum;
    const VF dq = load<VF>(g.d_prob + i) - (q == 0.0f ? VF{} : g.d_entropy * log(q));
    store(d_logits + i, dq);
    mean = fma(dq, q, mean);
  }
  const VF center = splat(sum(mean));
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const VF q = load<VF>(row.scores + i) / scores_sum;
    const VF softmax = exp_or_zero(load<VF>(row.logits + i) - row.lse);
    const VF d = q * (load<VF>(d_logits + i) - center) * load<VF>(row.slopes + i);
    store(d_logits + i, fma(softmax, g.d_lse, d));
  }
}

constexpr VectorOps kVectorOps = {
    weighted_sum,
    scale_and_dot,
    accumulate,
    describe,
    softmax,
    sigmoid,
    sqrt_softplus,
    add_softmax_statistics,
    add_elementwise_statistics,
    softmax_backward,
    elementwise_backward,
};

}  // namespace
}  // namespace dropless::cpu

#pragma GCC diagnostic pop
