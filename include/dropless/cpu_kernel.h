// Which GEMM micro-kernel the CPU backend runs on this machine.
#pragma once

namespace dropless::cpu {

// The fastest one that CPUID and the operating system allow, for bfloat16: "amx_bf16", "avx512_bf16",
// "avx512", "avx2" or "portable".
const char* kernel_name();

}  // namespace dropless::cpu
