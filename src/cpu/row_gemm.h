// Rows times their expert's matrix: the operands that grouped_gemm and the experts' GEMMs have in
// common.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/gemm_driver.h"
#include "dropless/experts.h"
#include "dropless/types.h"

namespace dropless::cpu {

// Rows of a [R, width] array, by position or through slot_of_row.
class RowSource {
 public:
  RowSource() = default;
  // Row r is row r of `x`, seen as [x.dims[0], all other axes].
  explicit RowSource(const ConstTensor& x);
  // Row r is x's row slot_of_row[r] / experts_per_token; zeros where the slot is "none".
  RowSource(const ConstTensor& x, const ConstTensor& slot_of_row, int64_t experts_per_token);

  DType dtype() const { return dtype_; }
  // The row of x that row r is, or -1 for none.
  int64_t index(int64_t r) const { return gathered_ ? index_[r] : r; }
  const void* row(int64_t r) const {
    const int64_t i = index(r);
    return i < 0 ? zeros_.data() : data_ + i * row_bytes_;
  }

 private:
  DType dtype_ = DType::kF32;
  const char* data_ = nullptr;
  int64_t row_bytes_ = 0;
  bool gathered_ = false;
  std::vector<int32_t> index_;  // [M], if gathered: divisions are done once, not for every panel
  std::vector<char> zeros_;     // one row
};

// rows[0..row_count), of dtype float8 decoded to bfloat16 from `offset` on for `length` elements;
// else as they are. `offset` becomes 0 if they were decoded. The pointers stay valid until the
// thread's next call.
const void* const* decoded_rows(const RowOps& ops, DType dtype, const void* const* rows,
                                int64_t row_count, int64_t length, int64_t* offset);

class RowGemm : public GemmProblem {
 public:
  RowGemm(RowSource a, const ConstTensor& a_scale, const ConstTensor& offsets, int64_t rows);

  // Adds the matrix [E, k, n] ([E, n, k] if transposed) with its scales; all must agree in shape.
  // The first one gives the size of the problem; further ones lie beside it (n_segments) or below
  // it (k_segments).
  void add_matrix(const ConstTensor& b, const ConstTensor& b_scale, bool transposed);

  void pack_a(const GemmKernel& kernel, const GemmGroup& group, int64_t m0, int64_t count,
              const KBlock& block, char* panels, char* scales, int64_t panel_bytes) const override;
  void prefetch_a(const GemmGroup& group, int64_t m0, int64_t count, const KBlock& block,
                  int64_t part, int64_t parts) const override;
  void pack_b(const GemmKernel& kernel, const GemmGroup& group, int segment, int64_t n0,
              int64_t count, const KBlock& block, void* panels, int64_t panel_bytes, float* scales,
              int64_t scale_stride) const override;

  // Runs with the kernels in use for the operands' dtype.
  void run(Executor& executor) const;

  const RowOps& ops() const { return *kernels_.rows; }
  // The first row of expert e.
  int64_t first_row(int64_t e) const { return first_row_[e]; }

 private:
  struct Matrix {
    ConstTensor values;
    ConstTensor scale;
  };
  const KernelSet& kernels_;
  RowSource a_;
  ConstTensor a_scale_;
  std::vector<int64_t> first_row_;  // [E]
  Matrix b_[2];
  int matrices_ = 0;
  bool transposed_ = false;
  int64_t k_ = 0;
};

// As the row operations take it.
GluOptions glu_options(const ActivationOptions& activation);

// Zeros the rows of `out` [M, ...] that belong to no expert; scales of float8 outputs become 1, as
// those of any all-zero block.
void clear_rows_outside(const ConstTensor& offsets, const Tensor& out);
void clear_scales_outside(const ConstTensor& offsets, const Tensor& scale);

// Writes n floats as out's dtype (float32 or bfloat16) at element `index`.
void write_values(const RowOps& ops, const Tensor& out, int64_t index, const float* values,
                  int64_t n);

// Asks for columns [n, n + count) of row `row` of out [R, width] ahead of a write.
void prefetch_columns(const Tensor& out, int64_t row, int64_t width, int64_t n, int64_t count);

// Quantises n <= 128 floats to q[index...] and returns the block's scale.
float write_e4m3(const RowOps& ops, const Tensor& q, int64_t index, const float* values, int64_t n,
                 ScaleRounding rounding);

}  // namespace dropless::cpu
