// Packing for the micro-kernels that multiply float32: panels are [k, width] floats, and bfloat16
// operands are widened (exactly) on the way. Unnamed namespace, no standard library: see
// gemm_kernel.h.
#pragma once

#include <cstdint>

#include "cpu/gemm_kernel.h"
#include "cpu/transpose.h"
#include "cpu/vector_math.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dropless::cpu {
namespace {

struct F32Source {
  static DROPLESS_INLINE const float* row(const void* p) { return static_cast<const float*>(p); }
  static DROPLESS_INLINE VF some(const float* p, int64_t n) { return get<VF>(p, n); }
  template <int kCount>
  static DROPLESS_INLINE void copy(const float* p, float* out) {
    __builtin_memcpy(out, p, kCount * sizeof(float));
  }
};

struct Bf16Source {
  static DROPLESS_INLINE const uint16_t* row(const void* p) {
    return static_cast<const uint16_t*>(p);
  }
  static DROPLESS_INLINE VF some(const uint16_t* p, int64_t n) { return widen_bf16(get<VH>(p, n)); }
  template <int kCount>
  static DROPLESS_INLINE void copy(const uint16_t* p, float* out) {
    for (int i = 0; i < kCount; ++i) {
      const uint32_t wide = uint32_t{p[i]} << 16;
      __builtin_memcpy(out + i, &wide, sizeof(wide));
    }
  }
};

// Element (k, w) of the panel is rows[k][offset + w].
template <int kWidth, class Source>
void pack_depth_major(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  float* out = static_cast<float*>(panel);
  for (int64_t i = 0; i < k; ++i, out += kWidth) {
    const auto* row = Source::row(rows[i]) + offset;
    if (count == kWidth) {
      // The rest of a width like 6 is copied by a known count: a partial vector takes 10 times as
      // long where the instruction set has no masks.
      constexpr int kWhole = kWidth / kLanes * kLanes;
#pragma GCC unroll 8
      for (int w = 0; w < kWhole; w += kLanes) store(out + w, Source::some(row + w, kLanes));
      Source::template copy<kWidth - kWhole>(row + kWhole, out + kWhole);
      continue;
    }
    for (int w = 0; w < kWidth; w += kLanes) {
      const int width = kWidth - w < kLanes ? kWidth - w : kLanes;
      const int64_t given = count - w < 0 ? 0 : (count - w < width ? count - w : width);
      put(out + w, given > 0 ? Source::some(row + w, given) : VF{}, width);
    }
  }
}

// [kLanes, kWidth] of a panel from w0 on: kLanes elements of each of the rows `row(w)`, of which
// there are count - w0.
template <int kWidth, class Row>
DROPLESS_INLINE void pack_square(Row row, int w0, int count, int64_t depth, float* out) {
  VF v[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) v[i] = w0 + i < count ? row(w0 + i) : VF{};
  transpose(v);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i >= depth) break;
    if (w0 + kLanes <= kWidth) {
      store(out + i * kWidth + w0, v[i]);
    } else {  // by a known count, as above
      __builtin_memcpy(out + i * kWidth + w0, &v[i], kWidth % kLanes * sizeof(float));
    }
  }
}

// Element (k, w) of the panel is rows[w][offset + k].
template <int kWidth, class Source>
void pack_transposed(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  // The whole cache line of a row before the next rows: rows whose distance is a large power of two
  // share so few sets of the first-level cache that a line would be gone before its next use.
  constexpr int kSquares = 16 / kLanes;
  float* out = static_cast<float*>(panel);
  int64_t k0 = 0;
  for (; k0 + kSquares * kLanes <= k; k0 += kSquares * kLanes) {
    for (int w0 = 0; w0 < kWidth; w0 += kLanes) {
#pragma GCC unroll 4
      for (int s = 0; s < kSquares; ++s) {
        const int64_t from = offset + k0 + s * kLanes;
        pack_square<kWidth>(
            [&](int w) { return Source::some(Source::row(rows[w]) + from, kLanes); }, w0, count,
            kLanes, out + (k0 + s * kLanes) * kWidth);
      }
    }
  }
  for (; k0 < k; k0 += kLanes) {
    const int64_t depth = k - k0 < kLanes ? k - k0 : kLanes;
    for (int w0 = 0; w0 < kWidth; w0 += kLanes) {
      pack_square<kWidth>(
          [&](int w) { return Source::some(Source::row(rows[w]) + offset + k0, depth); }, w0, count,
          depth, out + k0 * kWidth);
    }
  }
}

using Multiply = void (*)(int, int64_t, const void*, const void*, float*, int64_t, bool);

// 256 columns of B over this depth are 1 MiB, half of a server's second-level cache.
constexpr int64_t kF32KBlock = 1024;

// What the panels side by side read of these rows stays in the first-level cache for the last
// panel; with AVX2 the weights of small groups, which come from memory, took 1.5 times as long
// with 32.
constexpr int kF32PackRows = 8;

template <int kMr, int kNr, class Source>
constexpr GemmKernel make_f32_kernel(const char* name, Multiply multiply) {
  return {name,
          kMr,
          kNr,
          1,
          kF32PackRows,
          kF32KBlock,
          sizeof(float),
          true,
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
