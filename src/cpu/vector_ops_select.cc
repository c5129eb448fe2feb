#include "cpu/vector_ops.h"

namespace dropless::cpu {

const VectorOps& vector_ops() {
#if defined(__x86_64__)
  static const VectorOps& ops = []() -> const VectorOps& {
    // The subsets that files named *_avx512.cc and *_avx2.cc are compiled for.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("fma")) {
      return kAvx512VectorOps;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2VectorOps;
    return kPortableVectorOps;
  }();
  return ops;
#else
  return kPortableVectorOps;
#endif
}

}  // namespace dropless::cpu
