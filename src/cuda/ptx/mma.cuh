// Warp matrix multiply-accumulate and what feeds it on sm_80 and later, one instruction a wrapper.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace dropless::cuda::ptx {

// Four 8x8 matrices of 16-bit elements out of shared memory; lane l gives the address of row l % 8
// of matrix l / 8, and register i of lane l receives row l / 4, columns 2(l % 4) + {0, 1} of matrix
// i.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t smem_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address)
               : "memory");
}

// The same with each matrix transposed: the register holds column l / 4, rows 2(l % 4) + {0, 1}.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t smem_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address)
               : "memory");
}

// d [16, 8] += a [16, 16] * b [16, 8] in bf16 with fp32 accumulators. In lane l, d[0, 1] are row
// l / 4, columns 2(l % 4) + {0, 1}; d[2, 3] the same columns of row l / 4 + 8.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 4 bytes from device to shared memory, asynchronously; zeros if not `present`.
__device__ __forceinline__ void copy_async_4(uint32_t smem_address, const void* from,
                                             bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address), "l"(from),
               "r"(present ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups of copies are still under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t smem_address, uint32_t a, uint32_t b,
                                                uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ int4 load_shared_int4(uint32_t smem_address) {
  int4 value;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(smem_address)
               : "memory");
  return value;
}

__device__ __forceinline__ float load_shared_4(uint32_t smem_address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem_address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_4(uint32_t smem_address, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(smem_address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t smem_address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_address), "f"(value) : "memory");
}

}  // namespace dropless::cuda::ptx
