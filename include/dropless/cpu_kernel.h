// Which GEMM micro-kernel the CPU backend runs on this machine.
#pragma once

#include <cstdint>

#include "dropless/status.h"

namespace dropless::cpu {

// The fastest one that CPUID and the operating system allow, for bfloat16: "amx_bf16",
// "avx512_bf16", "avx512", "avx2" or "portable". The environment variable DROPLESS_CPU_KERNELS,
// read once, asks for another of them.
const char* kernel_name();

// An error if the environment variable names a set that this processor lacks.
Status kernel_status();

// The GEMM micro-kernel in use for an element type. One call computes rows x cols of C over a depth
// of at most `depth` of the contraction, which is as much as the driver packs at a time.
struct KernelTile {
  const char* name;
  int rows;
  int cols;
  int64_t depth;
};
KernelTile kernel_tile(bool bf16);

}  // namespace dropless::cpu
