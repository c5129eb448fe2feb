// FP8 e4m3 quantisation from the data at hand: no history, no hidden state.
//
// All arithmetic is fp32 with no flush to zero. Over a block: amax of the finite values;
// scale = max(amax / 448, 2^-126), or 1 for an all-zero block; inv = round(1 / scale);
// q = e4m3(round(x * inv)), to nearest even, saturating at +-448. -0 stays -0. NaN and +-Inf store
// 0x7F and touch nothing else. kPow2 rounds the scale up to a power of two before inv is taken.
#pragma once

#include "dropless/executor.h"
#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

// 1x128 blocks along the last axis.
struct QuantizeRowsArgs {
  ConstTensor x;  // [R, C] float32 | bfloat16
  ScaleRounding scale_rounding = ScaleRounding::kFp32;
  Tensor q;      // [R, C] float8
  Tensor scale;  // [R, ceil(C/128)] float32
};

// 128x128 blocks anchored at each expert matrix's corner, written in both orientations from one
// read.
struct QuantizeWeightArgs {
  ConstTensor w;  // [E, in, out] float32 | bfloat16
  ScaleRounding scale_rounding = ScaleRounding::kFp32;
  Tensor q;        // [E, in, out] float8
  Tensor q_t;      // [E, out, in] float8: the same codes, transposed
  Tensor scale;    // [E, ceil(in/128), ceil(out/128)] float32
  Tensor scale_t;  // [E, ceil(out/128), ceil(in/128)] float32: the same scales, transposed
};

// The value of an e4m3 code, and the scalar rules above, for tests and other backends.
float decode_e4m3(uint8_t code);
uint8_t encode_e4m3(float value);  // nearest even, saturating; non-finite gives 0x7F
float block_scale(float amax, ScaleRounding rounding);

Status check(const QuantizeRowsArgs& args);
Status check(const QuantizeWeightArgs& args);

namespace reference {
Status quantize_rows(const QuantizeRowsArgs& args);
Status quantize_weight(const QuantizeWeightArgs& args);
}  // namespace reference

namespace cpu {
Status quantize_rows(const QuantizeRowsArgs& args, Executor& executor);
Status quantize_weight(const QuantizeWeightArgs& args, Executor& executor);
}  // namespace cpu

}  // namespace dropless
