#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/large_pages.h"
#include "cpu/row_gemm.h"
#include "dropless/experts.h"

namespace dropless::cpu {
namespace {

// dx = [dh_gate | dh_up] @ [gate | up]^T: one product over a contraction of 2 I, in two segments;
// one if there is no up.
class ExpertUpBackward final : public RowGemm {
 public:
  explicit ExpertUpBackward(const ExpertUpBackwardArgs& args)
      : RowGemm(RowSource(args.dh), args.dh_scale, args.offsets, args.dh.dims[0]), args_(args) {
    // [E, H, I] is the transposed form of the [I, H] factor.
    add_matrix(args.gate, args.gate_scale, true);
    if (args.up.given()) add_matrix(args.up, args.up_scale, true);
    k_segments = args.up.given() ? 2 : 1;
  }

  void prefetch_store(const GemmStrip& strip, int, int64_t j, int64_t cols) const override {
    for (int i = 0; i < strip.rows; ++i) {
      prefetch_columns(args_.dx_rows, first_row(strip.group) + strip.m0 + i, n, strip.n0 + j, cols);
    }
  }

  void store(const GemmStrip& strip) const override {
    for (int i = 0; i < strip.rows; ++i) {
      const int64_t row = first_row(strip.group) + strip.m0 + i;
      write_values(ops(), args_.dx_rows, row_index(row, strip.n0, n), strip.c + i * strip.ldc,
                   strip.cols);
    }
  }

 private:
  const ExpertUpBackwardArgs& args_;
};

}  // namespace

Status expert_up_backward(const ExpertUpBackwardArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  prefer_large_pages({args.dx_rows});
  clear_rows_outside(args.offsets, args.dx_rows);
  ExpertUpBackward(args).run(executor);
  return Status();
} catch (...) {
  return exception_status("expert_up_backward");
}

}  // namespace dropless::cpu
