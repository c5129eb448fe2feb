// Warpgroup matrix multiply-accumulate (wgmma, sm_90a): bf16 operands in shared memory, fp32
// accumulators in registers. One overload per width; the width follows from the accumulator's size.
//
// Fragment of d in lane l of warp w (of the warpgroup's four): d[4j + 0, 1] are row 16w + l/4,
// columns 8j + 2(l%4) + {0, 1}; d[4j + 2, 3] are the same columns of row + 8.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma_registers.cuh"

namespace dropless::cuda::ptx {

// Orders register and shared-memory accesses before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warpgroup's groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared-memory matrix descriptor of a 128-byte-swizzled operand (PTX ISA, "Matrix descriptor
// format"). K-major: `stride_bytes` separates groups of 8 rows, `leading_bytes` is ignored.
// MN-major: chunks of 64 columns are `leading_bytes` apart and groups of 8 contraction steps
// `stride_bytes` apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t smem_address, uint32_t leading_bytes,
                                                      uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (uint64_t{stride_bytes >> 4} << 32) | (uint64_t{leading_bytes >> 4} << 16) |
         uint64_t{(smem_address & 0x3FFFF) >> 4};
}

// d [64, WIDTH] (+)= a [64, 16] * b [16, WIDTH], in REGISTERS = WIDTH / 2 accumulators of a thread;
// A, B, PREDICATE, TRANS_A and TRANS_B are the numbers of the operands that follow them.
#define DROPLESS_WGMMA(WIDTH, REGISTERS, A, B, PREDICATE, TRANS_A, TRANS_B)                      \
  template <bool kTransA, bool kTransB>                                                          \
  __device__ __forceinline__ void wgmma(float(&d)[REGISTERS], uint64_t a, uint64_t b,            \
                                        int accumulate) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #PREDICATE                                 \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #WIDTH                                      \
                 "k16.f32.bf16.bf16 {" DROPLESS_WGMMA_NAMES_##REGISTERS                          \
                 "}, %" #A ", %" #B ", p, 1, 1, %" #TRANS_A ", %" #TRANS_B ";\n}\n"              \
                 : DROPLESS_WGMMA_VALUES_##REGISTERS(d)                                          \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0)); \
  }

DROPLESS_WGMMA(128, 64, 64, 65, 66, 67, 68)
DROPLESS_WGMMA(192, 96, 96, 97, 98, 99, 100)
DROPLESS_WGMMA(256, 128, 128, 129, 130, 131, 132)
#undef DROPLESS_WGMMA

}  // namespace dropless::cuda::ptx
