// The micro-kernel for any CPU: plain loops over vectors of four floats, and the simplest one to
// read.
#include "cpu/gemm_kernel.h"
#include "cpu/pack_f32.h"
#include "cpu/row_ops.h"

namespace dropless::cpu {
namespace {

// A 4 x 8 tile of C takes 8 of the 16 vector registers of the smallest machines (SSE2, NEON has
// 32).
constexpr int kMr = 4;
constexpr int kNr = 8;
constexpr int kVectors = kNr / kLanes;

void multiply(int, int64_t k, const void* a, const void* b, float* c, int64_t ldc,
              bool accumulate) {
  const float* pa = static_cast<const float*>(a);  // [k, kMr]
  const float* pb = static_cast<const float*>(b);  // [k, kNr]
  VF acc[kMr][kVectors] = {};
  for (int64_t i = 0; i < k; ++i, pa += kMr, pb += kNr) {
    for (int m = 0; m < kMr; ++m) {
      for (int v = 0; v < kVectors; ++v) {
        acc[m][v] = fma(splat(pa[m]), load<VF>(pb + v * kLanes), acc[m][v]);
      }
    }
  }
  for (int m = 0; m < kMr; ++m) {
    for (int v = 0; v < kVectors; ++v) {
      float* out = c + m * ldc + v * kLanes;
      store(out, accumulate ? load<VF>(out) + acc[m][v] : acc[m][v]);
    }
  }
}

}  // namespace

const GemmKernel kPortableF32Kernel = make_f32_kernel<kMr, kNr, F32Source>("portable", multiply);
const GemmKernel kPortableBf16Kernel = make_f32_kernel<kMr, kNr, Bf16Source>("portable", multiply);
const RowOps kPortableRowOps = kRowOps;

}  // namespace dropless::cpu
