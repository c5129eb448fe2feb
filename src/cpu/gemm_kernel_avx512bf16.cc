// The micro-kernel for AVX-512 with bfloat16 dot products.
#if defined(__x86_64__)

// GCC 12 takes the intrinsics' "undefined" operands for uninitialised ones.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cpu/gemm_kernel.h"
#include "cpu/gemm_tile_avx512.h"
#include "cpu/pack_pairs_avx512.h"

namespace dropless::cpu {
namespace {

// Dword [p][w] of the panel is the pair (2p, 2p + 1) of row (column) w; see pack_pairs_avx512.h.
template <int kWidth, bool kTranspose>
void pack(const void* const* rows, int64_t offset, int count, int64_t k, void* panel) {
  auto* out = static_cast<uint32_t*>(panel);
  for (int64_t k0 = 0; k0 < k; k0 += 32, out += 16 * kWidth) {
    const int64_t depth = k - k0 < 32 ? k - k0 : 32;
    for (int w0 = 0; w0 < kWidth; w0 += 16) {
      const int width = count - w0 < 0 ? 0 : (count - w0 < 16 ? count - w0 : 16);
      __m512i r[16];
      if (kTranspose && width == 16 && depth == 32) {
        load_transposed_pairs(rows + w0, offset + k0, r);
      } else if constexpr (kTranspose) {
        load_pair_rows(rows + (width > 0 ? w0 : 0), offset + k0, width, depth, r);
        transpose_16x16(r);
      } else {
        load_pair_columns(rows + k0, offset + w0, width, depth, r);
      }
      const __mmask16 mask = first_words16(kWidth - w0);
      for (int64_t p = 0; 2 * p < depth; ++p) {
        _mm512_mask_storeu_epi32(out + p * kWidth + w0, mask, r[p]);
      }
    }
  }
}

// A pair of bfloat16 where FloatStep has a float.
struct PairStep {
  using Element = uint32_t;
  using Vector = __m512bh;
  static constexpr int kDepth = 2;
  static Vector load(const uint32_t* p) { return (Vector)_mm512_loadu_si512(p); }
  static Vector broadcast(uint32_t x) { return (Vector)_mm512_set1_epi32(static_cast<int>(x)); }
  static __m512 multiply_add(__m512 c, Vector a, Vector b) { return _mm512_dpbf16_ps(c, a, b); }
};

// 256 columns of B over this depth are 1 MiB, half of a second-level cache.
constexpr int64_t kKBlock = 2048;
// Operations on groups of 64 rows took 8 to 13 % longer with 8.
constexpr int kPackRows = 32;

}  // namespace

const GemmKernel kAvx512DotBf16Kernel = {"avx512_bf16",
                                         kMr,
                                         kNr,
                                         2,
                                         kPackRows,
                                         kKBlock,
                                         2,
                                         true,
                                         pack<kMr, true>,
                                         pack<kMr, false>,
                                         pack<kNr, false>,
                                         pack<kNr, true>,
                                         nullptr,
                                         nullptr,
                                         multiply<PairStep>};

}  // namespace dropless::cpu

#endif
