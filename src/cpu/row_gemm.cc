#include "cpu/row_gemm.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/index.h"
#include "cpu/prefetch.h"
#include "cpu/scratch.h"
#include "dropless/quantize.h"

namespace dropless::cpu {
namespace {

constexpr int64_t kMaxPanelRows = 64;  // mr or nr of any kernel

int64_t row_elements(const ConstTensor& x) {
  int64_t n = 1;
  for (int i = 1; i < x.rank; ++i) n *= x.dims[i];
  return n;
}

}  // namespace

RowSource::RowSource(const ConstTensor& x)
    : dtype_(x.dtype), data_(x.as<char>()), row_bytes_(row_elements(x) * size_of(x.dtype)) {}

RowSource::RowSource(const ConstTensor& x, const ConstTensor& slot_of_row,
                     int64_t experts_per_token)
    : RowSource(x) {
  gathered_ = true;
  index_.resize(slot_of_row.dims[0]);
  for (size_t r = 0; r < index_.size(); ++r) {
    index_[r] = static_cast<int32_t>(
        token_of_slot(slot_of_row.as<int32_t>()[r], experts_per_token, x.dims[0]));
  }
  zeros_.resize(row_bytes_);
}

const void* const* decoded_rows(const RowOps& ops, DType dtype, const void* const* rows,
                                int64_t row_count, int64_t length, int64_t* offset) {
  if (dtype != DType::kF8E4M3) return rows;
  static thread_local Scratch
      scratch;  // <= max(64 * 256, 64 * k_block) bfloat16 and their pointers
  const int64_t stride = (length + 31) / 32 * 32;
  char* data = scratch.reserve(row_count * (stride * 2 + static_cast<int64_t>(sizeof(void*))));
  auto** pointers = reinterpret_cast<const void**>(data + row_count * stride * 2);
  for (int64_t i = 0; i < row_count; ++i) {
    auto* row = reinterpret_cast<uint16_t*>(data) + i * stride;
    ops.e4m3_to_bf16(static_cast<const uint8_t*>(rows[i]) + *offset, row, length);
    pointers[i] = row;
  }
  *offset = 0;
  return pointers;
}

RowGemm::RowGemm(RowSource a, const ConstTensor& a_scale, const ConstTensor& offsets, int64_t rows)
    : kernels_(kernels()), a_(std::move(a)), a_scale_(a_scale) {
  const int64_t experts = offsets.dims[0] - 1;
  for (int64_t e = 0; e < experts; ++e) {
    const RowRange range = rows_of_expert(offsets.as<int32_t>(), e, rows);
    groups.push_back({e, range.size(), 0});
    first_row_.push_back(range.begin);
  }
  scaled = a_.dtype() == DType::kF8E4M3;
}

void RowGemm::add_matrix(const ConstTensor& b, const ConstTensor& b_scale, bool transposed) {
  b_[matrices_++] = {b, b_scale};
  transposed_ = transposed;
  k_ = b.dims[transposed ? 2 : 1];
  n = b.dims[transposed ? 1 : 2];
  for (GemmGroup& group : groups) group.k = k_;
}

void RowGemm::run(Executor& executor) const {
  run_gemm(*this, a_.dtype() == DType::kF32 ? *kernels_.f32 : *kernels_.bf16, *kernels_.rows,
           executor);
}

void RowGemm::pack_a(const GemmKernel& kernel, const GemmGroup& group, int64_t m0, int64_t count,
                     const KBlock& block, char* panels, char* scales, int64_t panel_bytes) const {
  const int64_t blocks = ceil_div(k_, kScaleBlock);  // of one segment
  for (int64_t j = 0; j < count; j += kernel.mr, panels += panel_bytes, scales += panel_bytes) {
    const int64_t first = first_row_[group.index] + m0 + j;
    const int panel_rows = static_cast<int>(std::min<int64_t>(kernel.mr, count - j));
    const void* rows[kMaxPanelRows];
    for (int i = 0; i < panel_rows; ++i) rows[i] = a_.row(first + i);
    int64_t offset = block.segment * k_ + block.begin;
    const void* const* source =
        decoded_rows(*kernels_.rows, a_.dtype(), rows, panel_rows, block.length, &offset);
    kernel.pack_a(source, offset, panel_rows, block.length, panels);
    if (!scaled) continue;

    auto* scale = reinterpret_cast<float*>(scales);
    for (int64_t b = 0; b < ceil_div(block.length, kScaleBlock); ++b) {
      for (int i = 0; i < kernel.mr; ++i) {
        const int64_t row = i < panel_rows ? a_.index(first + i) : -1;
        const int64_t index =
            (row * k_segments + block.segment) * blocks + block.begin / kScaleBlock + b;
        scale[b * kernel.mr + i] = row < 0 ? 0.0f : a_scale_.as<float>()[index];
      }
    }
  }
}

void RowGemm::prefetch_a(const GemmGroup& group, int64_t m0, int64_t count, const KBlock& block,
                         int64_t part, int64_t parts) const {
  const int64_t first = first_row_[group.index] + m0;
  const int64_t element = size_of(a_.dtype());
  const int64_t offset = (block.segment * k_ + block.begin) * element;
  for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) {
    prefetch_bytes(static_cast<const char*>(a_.row(first + i)) + offset, block.length * element);
  }
}

void RowGemm::pack_b(const GemmKernel& kernel, const GemmGroup& group, int segment, int64_t n0,
                     int64_t count, const KBlock& block, void* panels, int64_t panel_bytes,
                     float* scales, int64_t scale_stride) const {
  const Matrix& b = b_[k_segments > 1 ? block.segment : segment];
  const int64_t element = size_of(b.values.dtype);
  const char* matrix = b.values.as<char>() + group.index * k_ * n * element;
  char* out = static_cast<char*>(panels);
  const void* rows[kMaxPanelRows];
  if (transposed_) {
    for (int64_t j = 0; j < count; j += kernel.nr) {
      const int cols = static_cast<int>(std::min<int64_t>(kernel.nr, count - j));
      for (int i = 0; i < cols; ++i) rows[i] = matrix + (n0 + j + i) * k_ * element;
      int64_t offset = block.begin;
      const void* const* source =
          decoded_rows(*kernels_.rows, b.values.dtype, rows, cols, block.length, &offset);
      kernel.pack_b_transposed(source, offset, cols, block.length,
                               out + j / kernel.nr * panel_bytes);
    }
  } else {
    const int64_t together = kernel.pack_rows;
    for (int64_t k = 0; k < block.length; k += together) {
      const int64_t depth = std::min(together, block.length - k);
      for (int64_t i = 0; i < depth; ++i) rows[i] = matrix + (block.begin + k + i) * n * element;
      int64_t offset = n0;
      const void* const* source =
          decoded_rows(*kernels_.rows, b.values.dtype, rows, depth, count, &offset);
      for (int64_t j = 0; j < count; j += kernel.nr) {
        kernel.pack_b(source, offset + j, static_cast<int>(std::min<int64_t>(kernel.nr, count - j)),
                      depth,
                      out + j / kernel.nr * panel_bytes + k * kernel.nr * kernel.element_bytes);
      }
    }
  }
  if (!scaled) return;

  const int64_t k_blocks = ceil_div(k_, kScaleBlock), n_blocks = ceil_div(n, kScaleBlock);
  const float* scale = b.scale.as<float>() + group.index * k_blocks * n_blocks;
  for (int64_t i = 0; i < ceil_div(block.length, kScaleBlock); ++i) {
    const int64_t k = block.begin / kScaleBlock + i;
    for (int64_t j = 0; j < ceil_div(count, kernel.nr) * kernel.nr; ++j) {
      const int64_t block_n = std::min(n0 + j, n - 1) / kScaleBlock;
      scales[i * scale_stride + j] =
          scale[transposed_ ? block_n * k_blocks + k : k * n_blocks + block_n];
    }
  }
}

GluOptions glu_options(const ActivationOptions& activation) {
  return {static_cast<int>(activation.kind),
          activation.gated,
          activation.plain(),
          activation.slope,
          activation.gate_limit,
          activation.up_limit,
          activation.up_offset};
}

void clear_rows_outside(const ConstTensor& offsets, const Tensor& out) {
  if (!out.given()) return;
  const int64_t rows = out.dims[0];
  const int64_t bytes = row_elements(out) * size_of(out.dtype);
  const RowRange used = rows_of_all_experts(offsets.as<int32_t>(), offsets.dims[0] - 1, rows);
  if (rows == 0 || bytes == 0) return;  // then data may be null, which memset may not get
  std::memset(out.as<char>(), 0, used.begin * bytes);
  std::memset(out.as<char>() + used.end * bytes, 0, (rows - used.end) * bytes);
}

void clear_scales_outside(const ConstTensor& offsets, const Tensor& scale) {
  if (!scale.given()) return;
  const int64_t rows = scale.dims[0];
  const int64_t width = row_elements(scale);
  const RowRange used = rows_of_all_experts(offsets.as<int32_t>(), offsets.dims[0] - 1, rows);
  std::fill(scale.as<float>(), scale.as<float>() + used.begin * width, 1.0f);
  std::fill(scale.as<float>() + used.end * width, scale.as<float>() + rows * width, 1.0f);
}

void write_values(const RowOps& ops, const Tensor& out, int64_t index, const float* values,
                  int64_t n) {
  if (out.dtype == DType::kBF16) {
    ops.f32_to_bf16(values, out.as<uint16_t>() + index, n);
  } else {
    std::memcpy(out.as<float>() + index, values, n * sizeof(float));
  }
}

void prefetch_columns(const Tensor& out, int64_t row, int64_t width, int64_t n, int64_t count) {
  const int64_t element = size_of(out.dtype);
  prefetch_for_write(out.as<char>() + (row * width + n) * element, count * element);
}

float write_e4m3(const RowOps& ops, const Tensor& q, int64_t index, const float* values, int64_t n,
                 ScaleRounding rounding) {
  const float scale = block_scale(ops.finite_amax(values, n), rounding);
  ops.quantize(values, 1.0f / scale, q.as<uint8_t>() + index, n);
  return scale;
}

}  // namespace dropless::cpu
