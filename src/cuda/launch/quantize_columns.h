// Operands of FP8 weight gradients: quantised in blocks of 128 rows of an expert x 1 column, and
// transposed.
#pragma once

#include "core/token_blocks.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

struct QuantizeColumnsArgs {
  ConstTensor x;            // [M, planes, width], or [T, planes, width] with slot_of_row
  ConstTensor slot_of_row;  // [M] int32; not given: rows lie in order
  ConstTensor offsets;      // [E+1] int32
  int64_t rows = 0;         // M
  int64_t experts_per_token = 1;
  ScaleRounding scale_rounding = ScaleRounding::kFp32;
  void* codes = nullptr;  // BlockedOperand's, at a multiple of 128 bytes
  float* scales = nullptr;
};

// Blocks that no expert owns are left as they are.
Status quantize_columns(const QuantizeColumnsArgs& args, Stream stream);

}  // namespace dropless::cuda
