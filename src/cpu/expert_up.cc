#include <algorithm>

#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/large_pages.h"
#include "cpu/row_gemm.h"
#include "dropless/experts.h"

namespace dropless::cpu {
namespace {

// gate and up are two n-segments that share the gathered rows of x, so that both halves of h meet
// in one strip and A is computed where they are. Experts that are not gated have one.
class ExpertUp final : public RowGemm {
 public:
  explicit ExpertUp(const ExpertUpArgs& args)
      : RowGemm(RowSource(args.x, args.slot_of_row, args.experts_per_token), args.x_scale,
                args.offsets, args.a.dims[0]),
        args_(args) {
    add_matrix(args.gate, args.gate_scale, args.weights_transposed);
    if (args.activation.gated) add_matrix(args.up, args.up_scale, args.weights_transposed);
    n_segments = static_cast<int>(parts());
  }

  void prefetch_store(const GemmStrip& strip, int segment, int64_t j, int64_t cols) const override {
    for (int i = 0; i < strip.rows; ++i) {
      const int64_t row = first_row(strip.group) + strip.m0 + i;
      if (args_.h.given()) {
        prefetch_columns(args_.h, row * parts() + segment, n, strip.n0 + j, cols);
      }
      if (segment == 0) prefetch_columns(args_.a, row, n, strip.n0 + j, cols);
    }
  }

  void store(const GemmStrip& strip) const override {
    for (int i = 0; i < strip.rows; ++i) {
      const int64_t row = first_row(strip.group) + strip.m0 + i;
      for (int64_t j = 0; j < strip.cols; j += kScaleBlock) {
        float* gate = strip.c + i * strip.ldc + j;
        store_block(strip.group, row, strip.n0 + j, std::min(kScaleBlock, strip.cols - j), gate,
                    gate + strip.segment_stride);
      }
    }
  }

 private:
  int64_t parts() const { return args_.activation.parts(); }

  // Columns [i0, i0 + count) of one row, one block of scales. `up` is read only if gated.
  void store_block(int64_t e, int64_t row, int64_t i0, int64_t count, float* gate,
                   float* up) const {
    alignas(64) float a[kScaleBlock];
    GluForwardRow glu{};
    glu.gate = glu.h_gate = gate;
    glu.up = glu.h_up = up;
    glu.gate_bias = bias(args_.gate_bias, e, i0);
    glu.up_bias = bias(args_.up_bias, e, i0);
    glu.n = count;
    glu.options = glu_options(args_.activation);
    glu.round_bf16 = args_.x.dtype != DType::kF32;
    glu.a = a;
    ops().glu_forward(glu);
    if (args_.h.given()) {
      write(args_.h, args_.h_scale, row * parts(), i0, gate, count);
      if (parts() == 2) write(args_.h, args_.h_scale, row * 2 + 1, i0, up, count);
    }
    write(args_.a, args_.a_scale, row, i0, a, count);
  }

  const float* bias(const ConstTensor& b, int64_t e, int64_t i0) const {
    return b.given() ? b.as<float>() + row_index(e, i0, n) : nullptr;
  }

  void write(const Tensor& out, const Tensor& scale, int64_t row, int64_t i0, const float* values,
             int64_t count) const {
    const int64_t index = row_index(row, i0, n);
    if (out.dtype == DType::kF8E4M3) {
      scale.as<float>()[row_scale_index(row, i0, n)] =
          write_e4m3(ops(), out, index, values, count, args_.scale_rounding);
    } else {
      write_values(ops(), out, index, values, count);
    }
  }

  const ExpertUpArgs& args_;
};

}  // namespace

Status expert_up(const ExpertUpArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  prefer_large_pages({args.h, args.a});
  clear_rows_outside(args.offsets, args.h);
  clear_rows_outside(args.offsets, args.a);
  clear_scales_outside(args.offsets, args.h_scale);
  clear_scales_outside(args.offsets, args.a_scale);
  ExpertUp(args).run(executor);
  return Status();
} catch (...) {
  return exception_status("expert_up");
}

}  // namespace dropless::cpu
