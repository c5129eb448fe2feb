// Moves between registers and shared memory in the layout of matrix fragments.
#pragma once

#include <cstdint>

namespace dropless::cuda::ptx {

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and
// register i of lane l holds row l / 4, columns 2(l % 4) + {0, 1} of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem_address, uint32_t r0, uint32_t r1,
                                            uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// The same with each matrix transposed: the row at an address receives a column.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t smem_address,
                                                       const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// The reverse: register i of lane l gets row l / 4, columns 2(l % 4) + {0, 1} of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t smem_address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address)
               : "memory");
}

__device__ __forceinline__ void store_shared_2(uint32_t smem_address, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(smem_address), "h"(value) : "memory");
}

__device__ __forceinline__ void store_shared_v2(uint32_t smem_address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void store_shared_zero16(uint32_t smem_address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem_address), "r"(0) : "memory");
}

__device__ __forceinline__ float4 load_shared_16(uint32_t smem_address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(smem_address)
               : "memory");
  return value;
}

__device__ __forceinline__ float load_shared(uint32_t smem_address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem_address) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared_words(uint32_t smem_address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(smem_address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t smem_address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(smem_address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t smem_address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem_address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_word(uint32_t smem_address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem_address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_words(uint32_t smem_address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem_address), "r"(a), "r"(b) : "memory");
}

// 16 bytes from device to shared memory, asynchronously; zeros if not `present`.
__device__ __forceinline__ void copy_async_16(uint32_t smem_address, const void* from,
                                              bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}

// Arrives at `barrier`, which counts this arrival, when all of this thread's asynchronous copies so
// far have landed.
__device__ __forceinline__ void copy_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}

// Two floats rounded to nearest even, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The halves of such a pair.
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

}  // namespace dropless::cuda::ptx
