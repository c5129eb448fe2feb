// Activations and their derivatives in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "dropless/experts.h"

namespace dropless::reference {

struct Activated {
  double value;
  double slope;
};

// A function of one number, and its derivative.
inline Activated activation(const ActivationOptions& options, double z) {
  switch (options.kind) {
    case ActivationKind::kSilu: {
      const double alpha = options.slope;
      const double s = 1 / (1 + std::exp(-alpha * z));
      return {z * s, s * (1 + alpha * z * (1 - s))};
    }
    case ActivationKind::kGelu: {
      const double phi = 0.5 * std::erfc(-z / std::numbers::sqrt2);
      const double density = std::exp(-0.5 * z * z) / std::sqrt(2 * std::numbers::pi);
      return {z * phi, phi + z * density};
    }
    case ActivationKind::kGeluTanh: {
      const double c = std::sqrt(2 / std::numbers::pi);
      const double t = std::tanh(c * (z + 0.044715 * z * z * z));
      const double slope = 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z);
      return {0.5 * z * (1 + t), 0.5 * (1 + t) + slope};
    }
    case ActivationKind::kRelu:
      return {z < 0 ? 0 : z, z > 0 ? 1.0 : 0.0};
    case ActivationKind::kReluSquared:
      return {z < 0 ? 0 : z * z, z < 0 ? 0 : 2 * z};
  }
  return {0, 0};
}

// A of one pair of pre-activations, and its derivatives by them. `up` is not read if not gated.
struct GluValue {
  double a;
  double d_gate;
  double d_up;
};

inline GluValue glu(const ActivationOptions& options, double gate, double up) {
  const bool gate_passes = !(gate > options.gate_limit);
  const Activated act = activation(options, gate_passes ? gate : options.gate_limit);
  const double slope = gate_passes ? act.slope : 0;
  if (!options.gated) return {act.value, slope, 0};
  const bool up_passes = !(std::abs(up) > options.up_limit);
  const double u = up_passes ? up : std::copysign(static_cast<double>(options.up_limit), up);
  const double factor = u + options.up_offset;
  return {act.value * factor, slope * factor, up_passes ? act.value : 0};
}

}  // namespace dropless::reference
