// The bulk tensor copy engine (TMA), one instruction a wrapper. Every tensor map of this library
// has three axes, innermost first: coordinates are (column, row, plane).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace dropless::cuda::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (column, row, plane) -> shared memory; completes on `barrier` with the box's bytes.
__device__ __forceinline__ void tma_load(void* smem, const CUtensorMap* map, uint64_t* barrier,
                                         int column, int row, int plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(plane)
      : "memory");
}

// The same box into the same offset of every block of the cluster in `mask`, each completing on the
// barrier at the same offset.
__device__ __forceinline__ void tma_load_multicast(void* smem, const CUtensorMap* map,
                                                   uint64_t* barrier, int column, int row,
                                                   int plane, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(plane), "h"(mask)
      : "memory");
}

// `bytes` contiguous bytes -> shared memory, all three multiples of 16; completes on `barrier`.
__device__ __forceinline__ void bulk_load(void* smem, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(smem)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* smem, int column,
                                          int row, int plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared_address(smem)), "r"(column), "r"(row), "r"(plane)
      : "memory");
}

// `bytes` contiguous bytes of shared memory -> `to`, all three multiples of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(smem)), "r"(bytes)
               : "memory");
}

// Adds the box to global memory, element by element.
__device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* smem, int column,
                                        int row, int plane) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(map),
      "r"(shared_address(smem)), "r"(column), "r"(row), "r"(plane)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the newest kPending groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace dropless::cuda::ptx
