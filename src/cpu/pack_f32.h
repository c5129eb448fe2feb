// Packing for the micro-kernels that multiply float32: panels are [k, width] floats, and bfloat16 operands
// are widened (exactly) on the way. Unnamed namespace, no standard library: see gemm_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/gemm_kernel.h"
#include "cpu/vector_math.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

struct F32Source {
  using Element = float;
  static DROPLESS_INLINE float value(float x) { return x; }
  static DROPLESS_INLINE VF vector(const float* p) { return load<VF>(p); }
};

struct Bf16Source {
  using Element = uint16_t;
  static DROPLESS_INLINE float value(uint16_t x) {
    return __builtin_bit_cast(float, uint32_t{x} << 16);
  }
  static DROPLESS_INLINE VF vector(const uint16_t* p) { return widen_bf16(load<VH>(p)); }
};

// Element (k, w) of the panel is rows[k][offset + w].
template <int kWidth, class Source>
void pack_depth_major(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  float* out = static_cast<float*>(panel);
  for (int64_t i = 0; i < k; ++i, out += kWidth) {
    const auto* row = static_cast<const typename Source::Element*>(rows[i]) + offset;
    int w = 0;
    if (count == kWidth) {
      for (; w + kLanes <= kWidth; w += kLanes) store(out + w, Source::vector(row + w));
    }
    for (; w < count; ++w) out[w] = Source::value(row[w]);
    for (; w < kWidth; ++w) out[w] = 0.0f;
  }
}

// Element (k, w) of the panel is rows[w][offset + k].
template <int kWidth, class Source>
void pack_transposed(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  float* out = static_cast<float*>(panel);
  // Depth is cut so that the part of the panel being filled stays in the first-level cache.
  constexpr int64_t kStep = 16;
  for (int64_t k0 = 0; k0 < k; k0 += kStep) {
    const int64_t depth = k - k0 < kStep ? k - k0 : kStep;
    for (int w = 0; w < kWidth; ++w) {
      if (w >= count) {
        for (int64_t i = 0; i < depth; ++i) out[(k0 + i) * kWidth + w] = 0.0f;
        continue;
      }
      const auto* row = static_cast<const typename Source::Element*>(rows[w]) + offset + k0;
      for (int64_t i = 0; i < depth; ++i) out[(k0 + i) * kWidth + w] = Source::value(row[i]);
    }
  }
}

using Multiply = void (*)(int, int64_t, const void*, const void*, float*, int64_t, bool);

// 256 columns of B over this depth are 1 MiB, half of a server's second-level cache.
constexpr int64_t kF32KBlock = 1024;

template <int kMr, int kNr, class Source>
constexpr GemmKernel make_f32_kernel(const char* name, Multiply multiply) {
  return {name,
          kMr,
          kNr,
          1,
          kF32KBlock,
          sizeof(float),
          pack_transposed<kMr, Source>,
          pack_depth_major<kMr, Source>,
          pack_depth_major<kNr, Source>,
          pack_transposed<kNr, Source>,
          nullptr,
          nullptr,
          multiply};
}

}  // namespace
}  // namespace dropless::cpu

#pragma GCC diagnostic pop
