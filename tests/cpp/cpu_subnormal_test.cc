// XLA's threads flush subnormal numbers to zero; results must not depend on who calls.
#if defined(__SSE__)
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include "dropless/combine.h"
#include "dropless/route.h"
#include "tests/cpp/support/array.h"
#include "tests/cpp/support/routing.h"

namespace dropless::testing {
namespace {

// While it lives, this thread flushes results and treats subnormal operands as zero.
class Flushing {
 public:
  Flushing() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~Flushing() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

TEST(CpuSubnormals, I2_GroupSum) {
  // Two pieces of rows, so that partial sums are added by the calling thread.
  const Array x(DType::kF32, {300, 1, 3}), offsets = ints({0, 300});
  for (int64_t i = 0; i < x.size(); ++i) x.as<float>()[i] = 0x1p-140f;
  const Array out(DType::kF32, {1, 1, 3});
  {
    const Flushing flushing;
    ASSERT_TRUE(cpu::group_sum({x, {}, {}, offsets, false, 1, out}, serial_executor()).ok());
  }
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(out[i], 300 * 0x1p-140);
}

TEST(CpuSubnormals, I2_RouteBackward) {
  // Only the statistics have a gradient, and it is subnormal.
  Rng rng(5);
  Routing r(9, 4, 2);
  r.options.score_before_topk = false;  // then the statistics are skipped if they have no gradient
  r.randomize(rng);
  ASSERT_TRUE(reference::route(r.forward()).ok());
  r.d_weights.fill(0);
  r.d_sums.fill(0);
  for (int64_t e = 0; e < 4; ++e) r.d_prob_sum.as<float>()[e] = e == 0 ? 0x1p-130f : 0.0f;
  {
    const Flushing flushing;
    ASSERT_TRUE(cpu::route_backward(r.backward(), serial_executor()).ok());
  }
  for (int64_t t = 0; t < 9; ++t) EXPECT_GT(r.d_logits[t * 4], 0) << t;
}

}  // namespace
}  // namespace dropless::testing
#endif
