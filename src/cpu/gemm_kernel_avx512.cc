// The micro-kernel for AVX-512 in float32.
#if defined(__x86_64__)

// GCC 12 takes the intrinsics' "undefined" operands for uninitialised ones.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cpu/gemm_kernel.h"
#include "cpu/gemm_tile_avx512.h"
#include "cpu/pack_f32.h"
#include "cpu/row_ops.h"

namespace dropless::cpu {
namespace {

struct FloatStep {
  using Element = float;
  using Vector = __m512;
  static constexpr int kDepth = 1;
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static __m512 multiply_add(__m512 c, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace

const GemmKernel kAvx512F32Kernel =
    make_f32_kernel<kMr, kNr, F32Source>("avx512", multiply<FloatStep>);
const GemmKernel kAvx512Bf16Kernel =
    make_f32_kernel<kMr, kNr, Bf16Source>("avx512", multiply<FloatStep>);
const RowOps kAvx512RowOps = kRowOps;

}  // namespace dropless::cpu

#endif
