#include <algorithm>
#include <cstring>
#include <vector>

#include "core/element.h"
#include "core/exception_status.h"
#include "core/index.h"
#include "core/token_blocks.h"
#include "cpu/large_pages.h"
#include "cpu/prefetch.h"
#include "cpu/row_gemm.h"
#include "cpu/scratch.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"

namespace dropless::cpu {
namespace {

constexpr int64_t kMaxJobColumns = 512;  // of A packed by one call: 8 panels of any kernel
// Columns of x packed together without FP8, in bytes of a row: of the three or four cache lines
// that they touch, one is fetched twice. 8 panels of the deepest block still fit a second-level
// cache.
constexpr int64_t kJobBytes = 192;
constexpr int64_t kMaxStripsTogether = 8;

// dw[e] = x^T dy over the rows of expert e: the groups lie on the contraction, so each has its own
// k.
class GroupedWgrad final : public GemmProblem {
 public:
  explicit GroupedWgrad(const GroupedWgradArgs& args)
      : args_(args),
        kernels_(kernels()),
        dtype_(args.x_scale.given() ? args.dy.dtype : args.x.dtype),
        x_(source(args.x, args.x_scale, args.gather == Gather::kLhs)),
        dy_(source(args.dy, args.dy_scale, args.gather == Gather::kRhs)) {
    const int64_t rows = args.gather == Gather::kNone ? args.x.dims[0] : args.slot_of_row.dims[0];
    for (int64_t e = 0; e < args.dw[0].dims[0]; ++e) {
      const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
      groups.push_back({e, args.dw[0].dims[1], range.size()});
      first_row_.push_back(range.begin);
    }
    n = args.dw[0].dims[2];
    n_segments = static_cast<int>(args.dy.dims[1]);
    scaled = args.fp8;
  }

  void run(Executor& executor) {
    const bool f32 = dtype_ == DType::kF32 && !args_.fp8;
    const GemmKernel& kernel = f32 ? *kernels_.f32 : *kernels_.bf16;
    const int64_t bytes = kernel.mr * size_of(dtype_);
    strips_together = std::clamp<int64_t>(kJobBytes / bytes, 1, kMaxStripsTogether);
    run_gemm(*this, kernel, *kernels_.rows, executor);
  }

  void pack_a(const GemmKernel& kernel, const GemmGroup& group, int64_t m0, int64_t count,
              const KBlock& block, char* panels, char* scales, int64_t panel_bytes) const override {
    const bool blocked = args_.x_scale.given();
    const void* const* rows = blocked ? nullptr : rows_of(x_, group, block);
    for (int64_t k = 0; k < block.length; k += kScaleBlock) {
      const int64_t depth = std::min(kScaleBlock, block.length - k);
      const void* const* source = blocked ? nullptr : rows + k;
      int64_t offset = m0;
      float scale[kMaxJobColumns];
      if (args_.fp8) {
        source = blocked ? decoded(args_.x, args_.x_scale, group, block.begin + k, depth, 0, offset,
                                   count, scale)
                         : quantized(source, depth, offset, count, scale);
        offset = 0;
      }
      for (int64_t j = 0; j < count; j += kernel.mr) {
        const int64_t skip = j / kernel.mr * panel_bytes;
        const int width = static_cast<int>(std::min<int64_t>(kernel.mr, count - j));
        kernel.pack_a_transposed(source, offset + j, width, depth,
                                 panels + skip + k * kernel.mr * kernel.element_bytes);
        if (!args_.fp8) continue;
        auto* out = reinterpret_cast<float*>(scales + skip) + k / kScaleBlock * kernel.mr;
        for (int i = 0; i < kernel.mr; ++i) out[i] = i < width ? scale[j + i] : 0.0f;
      }
    }
  }

  void prefetch_a(const GemmGroup& group, int64_t m0, int64_t count, const KBlock& block,
                  int64_t part, int64_t parts) const override {
    if (args_.x_scale.given()) return;
    const int64_t first = first_row_[group.index] + block.begin;
    const int64_t element = size_of(dtype_);
    for (int64_t k = block.length * part / parts; k < block.length * (part + 1) / parts; ++k) {
      prefetch_bytes(static_cast<const char*>(x_.row(first + k)) + m0 * element, count * element);
    }
  }

  void pack_b(const GemmKernel& kernel, const GemmGroup& group, int segment, int64_t n0,
              int64_t count, const KBlock& block, void* panels, int64_t panel_bytes, float* scales,
              int64_t scale_stride) const override {
    const bool blocked = args_.dy_scale.given();
    const void* const* rows = blocked ? nullptr : rows_of(dy_, group, block);
    char* out = static_cast<char*>(panels);
    for (int64_t k = 0; k < block.length; k += kScaleBlock) {
      const int64_t depth = std::min(kScaleBlock, block.length - k);
      const void* const* source = blocked ? nullptr : rows + k;
      int64_t offset = segment * n + n0;
      if (args_.fp8) {
        float* scale = scales + k / kScaleBlock * scale_stride;
        source = blocked ? decoded(args_.dy, args_.dy_scale, group, block.begin + k, depth, segment,
                                   n0, count, scale)
                         : quantized(source, depth, offset, count, scale);
        offset = 0;
        std::fill(scale + count, scale + ceil_div(count, kernel.nr) * kernel.nr, 0.0f);
      }
      for (int64_t j = 0; j < count; j += kernel.nr) {
        kernel.pack_b(source, offset + j, static_cast<int>(std::min<int64_t>(kernel.nr, count - j)),
                      depth,
                      out + j / kernel.nr * panel_bytes + k * kernel.nr * kernel.element_bytes);
      }
    }
  }

  void prefetch_store(const GemmStrip& strip, int segment, int64_t j, int64_t cols) const override {
    for (int i = 0; i < strip.rows; ++i) {
      const int64_t row = strip.group * args_.dw[0].dims[1] + strip.m0 + i;
      prefetch_columns(args_.dw[segment], row, n, strip.n0 + j, cols);
    }
  }

  void store(const GemmStrip& strip) const override {
    const int64_t kc = args_.dw[0].dims[1];
    for (int s = 0; s < n_segments; ++s) {
      const Tensor& dw = args_.dw[s];
      for (int i = 0; i < strip.rows; ++i) {
        float* c = strip.c + i * strip.ldc + s * strip.segment_stride;
        const int64_t index = matrix_index(strip.group, strip.m0 + i, strip.n0, kc, n);
        if (args_.accumulate) add_old(dw, index, strip.cols, c);
        write_values(*kernels_.rows, dw, index, c, strip.cols);
      }
    }
  }

 private:
  RowSource source(const ConstTensor& x, const ConstTensor& scale, bool gather) const {
    if (scale.given()) return RowSource();
    return gather ? RowSource(x, args_.slot_of_row, args_.experts_per_token) : RowSource(x);
  }

  // Pointers to the rows of a K block; valid until the thread's next call.
  const void* const* rows_of(const RowSource& x, const GemmGroup& group,
                             const KBlock& block) const {
    static thread_local std::vector<const void*> rows;  // <= k_block
    rows.resize(block.length);
    const int64_t first = first_row_[group.index] + block.begin;
    for (int64_t i = 0; i < block.length; ++i) rows[i] = x.row(first + i);
    return rows.data();
  }

  // Columns [offset, offset + count) of <= 128 rows as bfloat16 e4m3 codes with a scale a column.
  const void* const* quantized(const void* const* rows, int64_t depth, int64_t offset,
                               int64_t count, float* scale) const {
    // At most (128 * 6 + 4) * 512 bytes: one call packs up to kMaxJobColumns columns of A, or an
    // item's columns of B, which the driver keeps to 512.
    static thread_local Scratch scratch;
    static thread_local const void* pointers[kScaleBlock];
    float* values =
        reinterpret_cast<float*>(scratch.reserve((depth * 6 + 4) * count));  // [depth, count]
    float* inverse = values + depth * count;                                 // [count]
    auto* codes = reinterpret_cast<uint16_t*>(inverse + count);              // [depth, count]
    const RowOps& ops = *kernels_.rows;
    for (int64_t i = 0; i < depth; ++i) {
      if (dtype_ == DType::kF32) {
        std::memcpy(values + i * count, static_cast<const float*>(rows[i]) + offset, count * 4);
      } else {
        ops.bf16_to_f32(static_cast<const uint16_t*>(rows[i]) + offset, values + i * count, count);
      }
    }
    ops.finite_amax_columns(values, count, depth, count, scale);
    for (int64_t j = 0; j < count; ++j) {
      scale[j] = block_scale(scale[j], args_.scale_rounding);
      inverse[j] = 1.0f / scale[j];
    }
    for (int64_t i = 0; i < depth; ++i) {
      ops.quantize_columns_to_bf16(values + i * count, inverse, codes + i * count, count);
      pointers[i] = codes + i * count;
    }
    return pointers;
  }

  // The same of an operand that comes quantised, for the expert's rows `row` .. row + depth - 1.
  const void* const* decoded(const ConstTensor& codes, const ConstTensor& scales,
                             const GemmGroup& group, int64_t row, int64_t depth, int64_t plane,
                             int64_t offset, int64_t count, float* scale) const {
    static thread_local Scratch scratch;
    static thread_local const void* pointers[kScaleBlock];
    auto* values = reinterpret_cast<uint16_t*>(scratch.reserve(depth * count * 2));
    const int64_t planes = codes.dims[1], columns = codes.dims[2];
    const int64_t block =
        first_token_block(first_row_[group.index], group.index) + row / kScaleBlock;
    const int64_t first = block * planes * columns, column = plane * columns + offset;
    for (int64_t j = 0; j < count; ++j) scale[j] = scales.as<float>()[first + column + j];
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t j = 0; j < count; ++j) {
        const int64_t at = first * kScaleBlock + token_block_byte(column + j, i);
        values[i * count + j] = float_to_bf16(decode_e4m3(codes.as<uint8_t>()[at]));
      }
      pointers[i] = values + i * count;
    }
    return pointers;
  }

  void add_old(const Tensor& dw, int64_t index, int64_t count, float* c) const {
    const RowOps& ops = *kernels_.rows;
    if (dw.dtype == DType::kF32) {
      ops.add(dw.as<float>() + index, c, count);
      return;
    }
    alignas(64) float old[kScaleBlock];
    for (int64_t j = 0; j < count; j += kScaleBlock) {
      const int64_t part = std::min(kScaleBlock, count - j);
      ops.bf16_to_f32(dw.as<uint16_t>() + index + j, old, part);
      ops.add(old, c + j, part);
    }
  }

  const GroupedWgradArgs& args_;
  const KernelSet& kernels_;
  const DType dtype_;  // of the operands that do not come quantised
  RowSource x_, dy_;
  std::vector<int64_t> first_row_;  // [E]
};

}  // namespace

Status grouped_wgrad(const GroupedWgradArgs& args, Executor& executor) try {
  if (Status status = check(args); !status.ok()) return status;
  prefer_large_pages({args.dw[0], args.dw[1]});
  GroupedWgrad(args).run(executor);
  return Status();
} catch (...) {
  return exception_status("grouped_wgrad");
}

}  // namespace dropless::cpu
