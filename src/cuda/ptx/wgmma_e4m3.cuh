// wgmma with e4m3 operands in shared memory, both K-major (the only order FP8 has), fp32
// accumulators in registers: wgmma.cuh says how fragments and descriptors are laid out. A step is
// 32 contraction elements, 32 bytes of a row. One overload per width, which follows from the
// accumulator's size.
//
// The tensor cores keep about 14 bits of a sum over many steps: accumulators are meant to be added
// to fp32 ones after every 128 of the contraction (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_registers.cuh"

namespace dropless::cuda::ptx {

// Keeps arithmetic on an accumulator from moving over the wait or the fence beside this.
template <int kRegisters>
__device__ __forceinline__ void wgmma_pin(float (&d)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d [64, WIDTH] (+)= a [64, 32] * b [32, WIDTH], in REGISTERS = WIDTH / 2 accumulators of a thread;
// A, B and PREDICATE are the numbers of the operands that follow them.
#define DROPLESS_WGMMA_E4M3(WIDTH, REGISTERS, A, B, PREDICATE)                             \
  __device__ __forceinline__ void wgmma_e4m3(float(&d)[REGISTERS], uint64_t a, uint64_t b, \
                                             int accumulate) {                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #PREDICATE                           \
                 ", 0;\n"                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #WIDTH                                \
                 "k32.f32.e4m3.e4m3 {" DROPLESS_WGMMA_NAMES_##REGISTERS "}, %" #A ", %" #B \
                                                                        ", p, 1, 1;\n}\n"  \
                 : DROPLESS_WGMMA_VALUES_##REGISTERS(d)                                    \
                 : "l"(a), "l"(b), "r"(accumulate));                                       \
  }

DROPLESS_WGMMA_E4M3(64, 32, 32, 33, 34)
DROPLESS_WGMMA_E4M3(96, 48, 48, 49, 50)
DROPLESS_WGMMA_E4M3(128, 64, 64, 65, 66)
DROPLESS_WGMMA_E4M3(192, 96, 96, 97, 98)
DROPLESS_WGMMA_E4M3(256, 128, 128, 129, 130)
#undef DROPLESS_WGMMA_E4M3

}  // namespace dropless::cuda::ptx
