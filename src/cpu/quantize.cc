#include "dropless/quantize.h"

#include <algorithm>
#include <cstring>

#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/row_gemm.h"

namespace dropless::cpu {
namespace {

// Reads n <= 128 elements as fp32, into `buffer` or where they are.
const float* read(const RowOps& ops, const ConstTensor& x, int64_t index, int64_t n,
                  float* buffer) {
  if (x.dtype == DType::kF32) return x.as<float>() + index;
  ops.bf16_to_f32(x.as<uint16_t>() + index, buffer, n);
  return buffer;
}

// One 128x128 block of one expert's matrix, in both orientations.
class WeightBlock {
 public:
  WeightBlock(const QuantizeWeightArgs& args, const RowOps& ops, int64_t e, int64_t i0, int64_t j0)
      : args_(args),
        ops_(ops),
        e_(e),
        i0_(i0),
        j0_(j0),
        in_(args.w.dims[1]),
        out_(args.w.dims[2]),
        rows_(std::min(kScaleBlock, in_ - i0)),
        cols_(std::min(kScaleBlock, out_ - j0)) {}

  void quantize() {
    float amax = 0;
    for (int64_t i = 0; i < rows_; ++i) amax = std::max(amax, ops_.finite_amax(row(i), cols_));
    const float scale = block_scale(amax, args_.scale_rounding);
    args_.scale.as<float>()[matrix_scale_index(e_, i0_, j0_, in_, out_)] = scale;
    args_.scale_t.as<float>()[matrix_scale_index(e_, j0_, i0_, out_, in_)] = scale;

    alignas(64) uint8_t codes[kScaleBlock * kScaleBlock];  // [rows, 128]
    for (int64_t i = 0; i < rows_; ++i) {
      ops_.quantize(row(i), 1.0f / scale, codes + i * kScaleBlock, cols_);
      std::memcpy(args_.q.as<uint8_t>() + matrix_index(e_, i0_ + i, j0_, in_, out_),
                  codes + i * kScaleBlock, cols_);
    }
    for (int64_t j = 0; j < cols_; ++j) {
      uint8_t* q_t = args_.q_t.as<uint8_t>() + matrix_index(e_, j0_ + j, i0_, out_, in_);
      for (int64_t i = 0; i < rows_; ++i) q_t[i] = codes[i * kScaleBlock + j];
    }
  }

 private:
  const float* row(int64_t i) {
    return read(ops_, args_.w, matrix_index(e_, i0_ + i, j0_, in_, out_), cols_, buffer_);
  }

  const QuantizeWeightArgs& args_;
  const RowOps& ops_;
  const int64_t e_, i0_, j0_, in_, out_, rows_, cols_;
  alignas(64) float buffer_[kScaleBlock];
};

}  // namespace

Status quantize_rows(const QuantizeRowsArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const RowOps& ops = *kernels().rows;
  const int64_t rows = args.x.dims[0], cols = args.x.dims[1];
  // Items of about 64 Ki elements: tens of microseconds.
  const int64_t step = std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(cols, 1));
  parallel_items(executor, ceil_div(rows, step), [&](int64_t item) {
    alignas(64) float buffer[kScaleBlock];
    for (int64_t row = item * step; row < std::min(rows, (item + 1) * step); ++row) {
      for (int64_t col = 0; col < cols; col += kScaleBlock) {
        const int64_t count = std::min(kScaleBlock, cols - col);
        const float* x = read(ops, args.x, row_index(row, col, cols), count, buffer);
        args.scale.as<float>()[row_scale_index(row, col, cols)] =
            write_e4m3(ops, args.q, row_index(row, col, cols), x, count, args.scale_rounding);
      }
    }
  });
  return Status();
} catch (...) {
  return exception_status("quantize_rows");
}

Status quantize_weight(const QuantizeWeightArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  const RowOps& ops = *kernels().rows;
  const int64_t in = args.w.dims[1], out = args.w.dims[2];
  const int64_t blocks = ceil_div(in, kScaleBlock);
  // An item is a strip of 128 rows of one expert's matrix.
  parallel_items(executor, args.w.dims[0] * blocks, [&](int64_t item) {
    for (int64_t j = 0; j < out; j += kScaleBlock) {
      WeightBlock(args, ops, item / blocks, item % blocks * kScaleBlock, j).quantize();
    }
  });
  return Status();
} catch (...) {
  return exception_status("quantize_weight");
}

}  // namespace dropless::cpu
