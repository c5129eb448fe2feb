#include <algorithm>
#include <cstring>
#include <vector>

#include "core/exception_status.h"
#include "core/index.h"
#include "core/token_blocks.h"
#include "cpu/chunks.h"
#include "cpu/large_pages.h"
#include "cpu/prefetch.h"
#include "cpu/row_gemm.h"
#include "dropless/experts.h"

namespace dropless::cpu {
namespace {

// dA' = dy @ down^T, and in its epilogue everything that follows from it row by row.
class ExpertDownBackward final : public RowGemm {
 public:
  explicit ExpertDownBackward(const ExpertDownBackwardArgs& args)
      : RowGemm(RowSource(args.dy, args.slot_of_row, args.weights.dims[1]), args.dy_scale,
                args.offsets, args.h.dims[0]),
        args_(args),
        partials_(args.h.dims[0] * ceil_div(args.h.dims[2], kScaleBlock)) {
    add_matrix(args.down, args.down_scale, true);
  }

  void prefetch_store(const GemmStrip& strip, int, int64_t j, int64_t cols) const override {
    const int64_t element = size_of(args_.h.dtype);
    for (int i = 0; i < strip.rows; ++i) {
      const int64_t row = first_row(strip.group) + strip.m0 + i;
      for (int64_t part = row * parts(); part < (row + 1) * parts(); ++part) {
        prefetch_bytes(args_.h.as<char>() + row_index(part, strip.n0 + j, n) * element,
                       cols * element);
        prefetch_columns(args_.dh, part, n, strip.n0 + j, cols);
      }
      prefetch_columns(args_.pa, row, n, strip.n0 + j, cols);
    }
  }

  void store(const GemmStrip& strip) const override {
    for (int i = 0; i < strip.rows; ++i) {
      const int64_t row = first_row(strip.group) + strip.m0 + i;
      for (int64_t j = 0; j < strip.cols; j += kScaleBlock) {
        store_block(row, strip.n0 + j, std::min(kScaleBlock, strip.cols - j),
                    strip.c + i * strip.ldc + j);
      }
    }
  }

  // After run(): d_weights[slot] = sum of the row's partial sums, in order, + dot(dy, down_bias).
  void finish(Executor& executor) const {
    constexpr int64_t kRows = 256;  // a block of rows is worth an item
    const int64_t rows = args_.h.dims[0];
    std::fill_n(args_.d_weights.as<float>(), args_.d_weights.size(), 0.0f);
    for (const GemmGroup& group : groups) {
      parallel_items(executor, ceil_div(group.m, kRows), [&](int64_t item) {
        std::vector<float> dy(args_.down_bias.given() ? args_.dy.dims[1] : 0);
        const int64_t begin = first_row(group.index) + item * kRows;
        const int64_t end = std::min(begin + kRows, first_row(group.index) + group.m);
        for (int64_t row = begin; row < std::min(end, rows); ++row) {
          finish_row(group.index, row, dy.data());
        }
      });
    }
  }

 private:
  int64_t parts() const { return args_.activation.parts(); }
  int64_t slot(int64_t row) const { return args_.slot_of_row.as<int32_t>()[row]; }
  int64_t token(int64_t row) const {
    return token_of_slot(slot(row), args_.weights.dims[1], args_.dy.dims[0]);
  }
  int64_t blocks() const { return ceil_div(n, kScaleBlock); }

  // Columns [i0, i0 + count) of one row.
  void store_block(int64_t row, int64_t i0, int64_t count, const float* d_a) const {
    alignas(64) float h_gate[kScaleBlock], h_up[kScaleBlock], pa[kScaleBlock];
    const bool used = token(row) >= 0;  // a row of no slot has zero gradients, whatever h holds
    GluBackwardRow glu{};
    glu.d_a = d_a;
    glu.h_gate = read_h(row * parts(), i0, count, used, h_gate);
    if (parts() == 2) glu.h_up = read_h(row * 2 + 1, i0, count, used, h_up);
    glu.weight = used ? args_.weights.as<float>()[slot(row)] : 0.0f;
    glu.n = count;
    glu.options = glu_options(args_.activation);
    glu.dh_gate = h_gate;  // each element is read before it is written
    glu.dh_up = h_up;
    glu.pa = pa;
    partials_[row * blocks() + i0 / kScaleBlock] = ops().glu_backward(glu);
    write_values(ops(), args_.pa, row_index(row, i0, n), pa, count);
    for (int64_t part = 0; part < parts(); ++part) {
      const float* dh = part == 0 ? h_gate : h_up;
      const int64_t index = row_index(row * parts() + part, i0, n);
      write_values(ops(), args_.dh, index, dh, count);
      if (args_.dh_q.given()) {
        args_.dh_scale.as<float>()[row_scale_index(row * parts() + part, i0, n)] =
            write_e4m3(ops(), args_.dh_q, index, dh, count, args_.scale_rounding);
      }
    }
  }

  // h as fp32, in `buffer` or where it is.
  const float* read_h(int64_t row, int64_t i0, int64_t count, bool used, float* buffer) const {
    const int64_t index = row_index(row, i0, n);
    if (!used) {
      std::memset(buffer, 0, count * sizeof(float));
    } else if (args_.h.dtype == DType::kF32) {
      return args_.h.as<float>() + index;
    } else if (args_.h.dtype == DType::kBF16) {
      ops().bf16_to_f32(args_.h.as<uint16_t>() + index, buffer, count);
    } else {
      ops().e4m3_to_f32(args_.h.as<uint8_t>() + index,
                        args_.h_scale.as<float>()[row_scale_index(row, i0, n)], buffer, count);
    }
    return buffer;
  }

  void finish_row(int64_t e, int64_t row, float* dy) const {
    const int64_t from = token(row);
    if (from < 0) return;
    float sum = 0;
    for (int64_t b = 0; b < blocks(); ++b) sum += partials_[row * blocks() + b];
    if (args_.down_bias.given()) {
      const int64_t width = args_.dy.dims[1];
      read_dy(from, width, dy);
      sum += ops().dot(dy, args_.down_bias.as<float>() + e * width, width);
    }
    args_.d_weights.as<float>()[slot(row)] = sum;
  }

  void read_dy(int64_t token, int64_t width, float* out) const {
    const int64_t index = token * width;
    if (args_.dy.dtype == DType::kF32) {
      std::memcpy(out, args_.dy.as<float>() + index, width * sizeof(float));
    } else if (args_.dy.dtype == DType::kBF16) {
      ops().bf16_to_f32(args_.dy.as<uint16_t>() + index, out, width);
    } else {
      for (int64_t k = 0; k < width; k += kScaleBlock) {
        ops().e4m3_to_f32(args_.dy.as<uint8_t>() + index + k,
                          args_.dy_scale.as<float>()[row_scale_index(token, k, width)], out + k,
                          std::min(kScaleBlock, width - k));
      }
    }
  }

  const ExpertDownBackwardArgs& args_;
  mutable std::vector<float>
      partials_;  // [M, ceil(I/128)] sums of dA' * A; each element has one writer
};

// dh and p * A as they would be, then quantised for the weight gradients.
Status with_columns(const ExpertDownBackwardArgs& args, Executor& executor) {
  const int64_t rows = args.h.dims[0], parts = args.h.dims[1], width = args.h.dims[2];
  std::vector<uint16_t> dh(rows * parts * width), pa(rows * width);
  ExpertDownBackwardArgs plain = args;
  plain.dh = Tensor{dh.data(), DType::kBF16, 3, {rows, parts, width}};
  plain.pa = Tensor{pa.data(), DType::kBF16, 2, {rows, width}};
  for (Tensor* columns :
       {&plain.dh_columns, &plain.dh_columns_scale, &plain.pa_columns, &plain.pa_columns_scale}) {
    *columns = Tensor();
  }
  if (Status status = expert_down_backward(plain, executor); !status.ok()) return status;
  const Tensor pa_planes = {pa.data(), DType::kBF16, 3, {rows, 1, width}};
  for_chunks(executor, args.down.dims[0], 1, [&](int64_t e, int64_t) {
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    quantize_token_blocks(plain.dh, range, e, args.scale_rounding, args.dh_columns,
                          args.dh_columns_scale);
    quantize_token_blocks(pa_planes, range, e, args.scale_rounding, args.pa_columns,
                          args.pa_columns_scale);
  });
  return Status();
}

}  // namespace

Status expert_down_backward(const ExpertDownBackwardArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  if (args.dh_columns.given()) return with_columns(args, executor);
  prefer_large_pages({args.dh, args.dh_q, args.pa});
  for (const Tensor& out : {args.dh, args.dh_q, args.pa}) clear_rows_outside(args.offsets, out);
  clear_scales_outside(args.offsets, args.dh_scale);
  ExpertDownBackward problem(args);
  problem.run(executor);
  problem.finish(executor);
  return Status();
} catch (...) {
  return exception_status("expert_down_backward");
}

}  // namespace dropless::cpu
