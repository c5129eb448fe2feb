// Gated activations and their derivatives in double.
#pragma once

#include <cmath>
#include <numbers>

#include "dropless/experts.h"

namespace dropless::reference {

inline double activation(ActivationKind kind, double z) {
  switch (kind) {
    case ActivationKind::kSilu:
      return z / (1 + std::exp(-z));
    case ActivationKind::kGelu:
      return z * 0.5 * std::erfc(-z / std::numbers::sqrt2);
    case ActivationKind::kGeluTanh:
      return 0.5 * z *
             (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z)));
  }
  return 0;
}

inline double activation_derivative(ActivationKind kind, double z) {
  switch (kind) {
    case ActivationKind::kSilu: {
      const double s = 1 / (1 + std::exp(-z));
      return s * (1 + z * (1 - s));
    }
    case ActivationKind::kGelu: {
      const double density = std::exp(-0.5 * z * z) / std::sqrt(2 * std::numbers::pi);
      return 0.5 * std::erfc(-z / std::numbers::sqrt2) + z * density;
    }
    case ActivationKind::kGeluTanh: {
      const double c = std::sqrt(2 / std::numbers::pi);
      const double t = std::tanh(c * (z + 0.044715 * z * z * z));
      return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z);
    }
  }
  return 0;
}

}  // namespace dropless::reference
