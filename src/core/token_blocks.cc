#include "core/token_blocks.h"

#include <cmath>

#include "core/element.h"

namespace dropless {

void quantize_token_blocks(const ConstTensor& values, RowRange range, int64_t expert,
                           ScaleRounding rounding, const Tensor& codes, const Tensor& scale) {
  const int64_t planes = values.dims[1], width = values.dims[2], columns = codes.dims[2];
  for (int64_t begin = range.begin; begin < range.end; begin += kScaleBlock) {
    const int64_t block =
        first_token_block(range.begin, expert) + (begin - range.begin) / kScaleBlock;
    const int64_t rows = range.end - begin < kScaleBlock ? range.end - begin : kScaleBlock;
    for (int64_t column = 0; column < planes * columns; ++column) {
      const int64_t plane = column / columns, at = column % columns;
      float value[kScaleBlock] = {};
      float amax = 0.0f;
      for (int64_t r = 0; r < rows && at < width; ++r) {
        value[r] = static_cast<float>(load(values, ((begin + r) * planes + plane) * width + at));
        if (std::isfinite(value[r])) amax = std::fmax(amax, std::fabs(value[r]));
      }
      const float by = block_scale(amax, rounding);
      const float inverse = 1.0f / by;
      scale.as<float>()[block * planes * columns + column] = by;
      uint8_t* const to = codes.as<uint8_t>() + block * planes * columns * kScaleBlock;
      for (int64_t r = 0; r < kScaleBlock; ++r) {
        to[token_block_byte(column, r)] = encode_e4m3(value[r] * inverse);
      }
    }
  }
}

}  // namespace dropless
