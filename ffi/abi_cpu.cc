#include <cstdint>

#include "dropless/cpu_kernel.h"
#include "ffi/contract.h"

DROPLESS_EXPORT const char* dropless_cpu_kernel(void) { return dropless::cpu::kernel_name(); }

// Name of the GEMM micro-kernel for bfloat16 (bf16 != 0) or float32, and its tile {rows, cols,
// depth}.
DROPLESS_EXPORT const char* dropless_cpu_kernel_tile(int bf16, int64_t* tile) {
  const dropless::cpu::KernelTile kernel = dropless::cpu::kernel_tile(bf16 != 0);
  tile[0] = kernel.rows;
  tile[1] = kernel.cols;
  tile[2] = kernel.depth;
  return kernel.name;
}
