#include "dropless/grouped_gemm.h"

#include "core/exception_status.h"
#include "core/index.h"
#include "cpu/large_pages.h"
#include "cpu/row_gemm.h"

namespace dropless::cpu {
namespace {

class GroupedGemm final : public RowGemm {
 public:
  explicit GroupedGemm(const GroupedGemmArgs& args)
      : RowGemm(RowSource(args.lhs), args.lhs_scale, args.offsets, args.lhs.dims[0]), args_(args) {
    add_matrix(args.rhs, args.rhs_scale, args.rhs_transposed);
  }

  void prefetch_store(const GemmStrip& strip, int, int64_t j, int64_t cols) const override {
    for (int i = 0; i < strip.rows; ++i) {
      prefetch_columns(args_.out, first_row(strip.group) + strip.m0 + i, n, strip.n0 + j, cols);
    }
  }

  void store(const GemmStrip& strip) const override {
    const float* bias =
        args_.bias.given() ? args_.bias.as<float>() + row_index(strip.group, strip.n0, n) : nullptr;
    for (int i = 0; i < strip.rows; ++i) {
      float* c = strip.c + i * strip.ldc;
      if (bias != nullptr) ops().add(bias, c, strip.cols);
      const int64_t row = first_row(strip.group) + strip.m0 + i;
      write_values(ops(), args_.out, row_index(row, strip.n0, n), c, strip.cols);
    }
  }

 private:
  const GroupedGemmArgs& args_;
};

}  // namespace

Status grouped_gemm(const GroupedGemmArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  prefer_large_pages({args.out});
  clear_rows_outside(args.offsets, args.out);
  GroupedGemm(args).run(executor);
  return Status();
} catch (...) {
  return exception_status("grouped_gemm");
}

}  // namespace dropless::cpu
