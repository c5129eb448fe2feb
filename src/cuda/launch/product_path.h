// Which family of kernels runs a grouped product.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "dropless/cuda.h"

namespace dropless::cuda {

enum class ProductPath {
  kSm90,  // bfloat16 by TMA and wgmma: compute capability 9.0, arrays that TMA can address
  kSm80,  // bfloat16 by cp.async and mma: every other GPU since 8.0, every other size and address
  kF32,   // float32 by FFMA
};

// The path for operands of `dtype`. `arrays` are all matrices that the product reads or writes;
// those not given do not count. The environment variable DROPLESS_GPU_PATH, read when the first
// product is called, may be "auto", the default, or "sm80", which keeps to kernels that run on
// every GPU.
Status choose_path(const char* op, DType dtype, std::initializer_list<ConstTensor> arrays,
                   ProductPath* path);

// The largest of 16, 4, 2 bytes that divides the addresses and the rows (the last axis) of all
// given arrays.
int common_alignment(std::initializer_list<ConstTensor> arrays);

}  // namespace dropless::cuda
