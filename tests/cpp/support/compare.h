// Comparison against a reference, with bounds that come from formats and accumulation lengths.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cpp/support/array.h"

namespace dropless::testing {

// Largest relative error of rounding a number to the type: 2^-p for p significant bits.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 0x1p-24;
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF8E4M3:
      return 0x1p-4;
    default:
      return 0;
  }
}

// |got - expected| <= of_value * |expected| + of_rms * (root mean square of expected nearby).
struct Bound {
  double of_value = 0;
  double of_rms = 0;

  Bound operator+(Bound other) const { return {of_value + other.of_value, of_rms + other.of_rms}; }
};

// Both sides were rounded to `dtype` from nearly the same number.
inline Bound rounded_to(DType dtype) { return {2 * unit_roundoff(dtype), 0}; }

// An fp32 sum of `depth` products of independent, unit-scale, zero-mean numbers. Partial sums grow
// like sqrt(j), so the rounding errors add up to about 0.4 * sqrt(depth) * 2^-24 of the result's
// RMS (one standard deviation); 10 of those are never reached by chance.
inline Bound fp32_sum(int64_t depth) {
  return {0, 4 * std::sqrt(static_cast<double>(std::max<int64_t>(depth, 1))) * 0x1p-24};
}

// Each of `depth` summands carries an independent relative error of up to `roundoff` (operands that
// were rounded before the sum). Rounding errors are uniform, so one standard deviation is
// roundoff / sqrt(3) of the RMS whatever the depth; 6 of those leave out no element in practice.
inline Bound rounded_summands(double roundoff) { return {0, 6 * roundoff / std::sqrt(3.0)}; }

// Compares `got` with `expected`, of equal shape. The RMS is that of the stripe of 16 columns the
// element lies in, over all rows: a fault in one stripe is not hidden by the others, and an
// all-zero stripe must be exactly zero. `offsets`, if given, holds [E+1] row offsets and names the
// group of a failing row.
inline ::testing::AssertionResult close(const Array& got, const Array& expected, Bound bound,
                                        const std::vector<int32_t>& offsets = {}) {
  if (got.dims() != expected.dims()) {
    return ::testing::AssertionFailure()
           << "shapes differ: got " << got.shape() << ", expected " << expected.shape();
  }
  constexpr int64_t kStripe = 16;
  const int64_t cols = got.dims().empty() ? 0 : got.dims().back();
  // The last stripe takes what is left over, so that its RMS is not that of one or two numbers.
  const int64_t stripes = std::max<int64_t>(1, cols / kStripe);
  std::vector<double> squares(static_cast<size_t>(stripes), 0), count(squares);
  const auto stripe_of = [&](int64_t i) {
    return static_cast<size_t>(std::min(i % cols / kStripe, stripes - 1));
  };
  std::vector<bool> row_is_zero(static_cast<size_t>(cols == 0 ? 0 : got.size() / cols), true);
  const auto zero_row = [&](int64_t i) { return row_is_zero[static_cast<size_t>(i / cols)]; };
  for (int64_t i = 0; i < got.size(); ++i) {
    if (expected[i] != 0) row_is_zero[static_cast<size_t>(i / cols)] = false;
  }
  for (int64_t i = 0; i < got.size(); ++i) {
    if (zero_row(i)) continue;
    squares[stripe_of(i)] += expected[i] * expected[i];
    count[stripe_of(i)] += 1;
  }
  int64_t failures = 0;
  std::ostringstream text;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double rms = zero_row(i) ? 0 : std::sqrt(squares[stripe_of(i)] / count[stripe_of(i)]);
    const double allowed = bound.of_value * std::abs(expected[i]) + bound.of_rms * rms;
    if (std::abs(got[i] - expected[i]) <= allowed) continue;
    if (++failures > 5) continue;
    text << "\n  at [";
    int64_t rest = i;
    std::string coordinate;
    int64_t row = 0;
    for (size_t axis = got.dims().size(); axis-- > 0;) {
      row = rest % got.dims()[axis];
      coordinate = std::to_string(row) + (coordinate.empty() ? "" : ", ") + coordinate;
      rest /= got.dims()[axis];
    }
    text << coordinate << "]: expected " << expected[i] << ", got " << got[i] << ", bound "
         << allowed << " (RMS " << rms << ")";
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      if (offsets[e] <= row && row < offsets[e + 1]) {
        text << ", group " << e << " of rows " << offsets[e] << ".." << offsets[e + 1];
      }
    }
  }
  if (failures == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << failures << " of " << got.size() << " elements differ, the first:" << text.str();
}

// Rows [begin, end) of the first axis are exactly +0 or -0.
inline ::testing::AssertionResult rows_are_zero(const Array& a, int64_t begin, int64_t end) {
  const int64_t width = a.dim(0) == 0 ? 0 : a.size() / a.dim(0);
  for (int64_t i = begin * width; i < end * width; ++i) {
    if (a[i] == 0) continue;
    return ::testing::AssertionFailure()
           << "row " << i / width << ", element " << i % width << " of " << a.shape() << " is "
           << a[i] << ", expected exactly 0";
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult all_finite(const Array& a) {
  for (int64_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << " of " << a.shape() << " is " << a[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace dropless::testing
