// The quantiser's rules for one block of fp32 values (dropless/quantize.h). Unlike the rest of the
// reference this is fp32 arithmetic: the rules fix the bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "dropless/quantize.h"

namespace dropless::reference {

struct QuantizedBlock {
  float scale;
  std::vector<uint8_t> codes;
};

inline QuantizedBlock quantize_block(const std::vector<float>& values, ScaleRounding rounding) {
  float amax = 0.0f;
  for (const float v : values) {
    if (std::isfinite(v) && std::fabs(v) > amax) amax = std::fabs(v);
  }
  QuantizedBlock block;
  block.scale = block_scale(amax, rounding);
  const float inverse = 1.0f / block.scale;
  for (const float v : values) block.codes.push_back(encode_e4m3(v * inverse));
  return block;
}

}  // namespace dropless::reference
