// XLA runs CPU programs with subnormal numbers flushed to zero. The rules of the quantiser are
// stated without flushing, and results must not depend on which thread ran an item.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace dropless {

// While it lives, this thread's SSE and AVX arithmetic is IEEE: round to nearest, no flush to zero.
class ScopedIeeeFloats {
 public:
#if defined(__SSE__)
  ScopedIeeeFloats() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushAndRounding); }
  ~ScopedIeeeFloats() { _mm_setcsr(saved_); }
#else
  ScopedIeeeFloats() = default;
#endif
  ScopedIeeeFloats(const ScopedIeeeFloats&) = delete;
  ScopedIeeeFloats& operator=(const ScopedIeeeFloats&) = delete;

 private:
#if defined(__SSE__)
  // MXCSR: flush results (bit 15), rounding mode (14, 13), treat subnormal inputs as zero (6).
  static constexpr unsigned kFlushAndRounding = 0x8000u | 0x6000u | 0x0040u;
  unsigned saved_;
#endif
};

}  // namespace dropless
