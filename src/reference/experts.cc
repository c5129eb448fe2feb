#include "dropless/experts.h"

#include <numeric>
#include <vector>

#include "core/exception_status.h"
#include "core/token_blocks.h"
#include "dropless/quantize.h"
#include "reference/activation.h"
#include "reference/operand.h"

namespace dropless::reference {
namespace {

// Writes values [rows, width] to a float32 or bfloat16 tensor of that many elements, or quantises
// them in 1x128 blocks if the tensor is float8.
Status write_rows(const Values& values, int64_t rows, int64_t width, ScaleRounding rounding,
                  const Tensor& out, const Tensor& scale) {
  if (out.dtype != DType::kF8E4M3) {
    for (size_t i = 0; i < values.size(); ++i) store(out, static_cast<int64_t>(i), values[i]);
    return Status();
  }
  std::vector<float> rounded(values.begin(), values.end());
  QuantizeRowsArgs args;
  args.x = ConstTensor{rounded.data(), DType::kF32, 2, {rows, width}};
  args.scale_rounding = rounding;
  args.q = Tensor{out.data, DType::kF8E4M3, 2, {rows, width}};
  args.scale = Tensor{scale.data, DType::kF32, 2, {rows, ceil_div(width, kScaleBlock)}};
  return quantize_rows(args);
}

// h rounded to the type it is stored in, which is bfloat16 for FP8 operands too.
double round_h(double h, DType operands) {
  const float rounded = static_cast<float>(h);
  return operands == DType::kF32 ? rounded : round_to_bf16(rounded);
}

}  // namespace

Status expert_up(const ExpertUpArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.x.dims[0];
  const int64_t width = args.x.dims[1];   // H
  const int64_t rows = args.a.dims[0];    // M
  const int64_t hidden = args.a.dims[1];  // I
  const int64_t num_experts = args.gate.dims[0];
  const int64_t parts = args.activation.parts();  // P
  Values h(rows * parts * hidden, 0.0);           // [M, P, I]
  Values a(rows * hidden, 0.0);                   // [M, I]

  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    if (range.size() == 0) continue;
    const Values w_gate = matrix_values(args.gate, args.gate_scale, e, args.weights_transposed);
    Values w_up;
    if (parts == 2) w_up = matrix_values(args.up, args.up_scale, e, args.weights_transposed);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t token =
          token_of_slot(args.slot_of_row.as<int32_t>()[row], args.experts_per_token, tokens);
      Values gate = bias_values(args.gate_bias, e, hidden);
      Values up = bias_values(args.up_bias, e, hidden);
      if (token >= 0) {
        const Values x = row_values(args.x, args.x_scale, token, width);
        add_product(x, w_gate, gate);
        if (parts == 2) add_product(x, w_up, up);
      }
      for (int64_t i = 0; i < hidden; ++i) {
        h[row * parts * hidden + i] = gate[i];
        if (parts == 2) h[(row * 2 + 1) * hidden + i] = up[i];
        a[row * hidden + i] =
            glu(args.activation, round_h(gate[i], args.x.dtype), round_h(up[i], args.x.dtype)).a;
      }
    }
  }
  if (args.h.given()) {
    Status status = write_rows(h, rows * parts, hidden, args.scale_rounding, args.h, args.h_scale);
    if (!status.ok()) return status;
  }
  return write_rows(a, rows, hidden, args.scale_rounding, args.a, args.a_scale);
} catch (...) {
  return exception_status("expert_up");
}

Status expert_down_backward(const ExpertDownBackwardArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t tokens = args.dy.dims[0];
  const int64_t width = args.dy.dims[1];  // H
  const int64_t rows = args.h.dims[0];    // M
  const int64_t hidden = args.h.dims[2];  // I
  const int64_t per_token = args.weights.dims[1];
  const int64_t num_experts = args.down.dims[0];
  const int64_t parts = args.activation.parts();  // P
  Values dh(rows * parts * hidden, 0.0);          // [M, P, I]
  Values pa(rows * hidden, 0.0);                  // [M, I]
  for (int64_t slot = 0; slot < args.d_weights.size(); ++slot) store(args.d_weights, slot, 0.0);

  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    if (range.size() == 0) continue;
    const Values down_transposed = matrix_values(args.down, args.down_scale, e, true);  // [H, I]
    const Values down_bias = bias_values(args.down_bias, e, width);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t slot = args.slot_of_row.as<int32_t>()[row];
      const int64_t token = token_of_slot(slot, per_token, tokens);
      if (token < 0) continue;
      const double p = load(args.weights, slot);
      const Values dy = row_values(args.dy, args.dy_scale, token, width);
      const Values gate = row_values(args.h, args.h_scale, row * parts, hidden);
      Values up(hidden, 0.0);
      if (parts == 2) up = row_values(args.h, args.h_scale, row * 2 + 1, hidden);
      Values da(hidden, 0.0);  // of A, before p
      add_product(dy, down_transposed, da);
      double d_weight = std::inner_product(dy.begin(), dy.end(), down_bias.begin(), 0.0);
      for (int64_t i = 0; i < hidden; ++i) {
        const GluValue value = glu(args.activation, gate[i], up[i]);
        dh[row * parts * hidden + i] = p * da[i] * value.d_gate;
        if (parts == 2) dh[(row * 2 + 1) * hidden + i] = p * da[i] * value.d_up;
        pa[row * hidden + i] = p * value.a;
        d_weight += da[i] * value.a;
      }
      store(args.d_weights, slot, d_weight);
    }
  }
  const ScaleRounding rounding = args.scale_rounding;
  if (args.dh_q.given()) {
    Status status = write_rows(dh, rows * parts, hidden, rounding, args.dh_q, args.dh_scale);
    if (!status.ok()) return status;
  }
  if (args.dh_columns.given()) {
    const auto quantize = [&](const Values& values, int64_t planes, const Tensor& codes,
                              const Tensor& scale) {
      std::vector<uint16_t> rounded(values.size());
      const Tensor narrow = {rounded.data(), DType::kBF16, 3, {rows, planes, hidden}};
      for (size_t i = 0; i < values.size(); ++i) store(narrow, static_cast<int64_t>(i), values[i]);
      for (int64_t e = 0; e < num_experts; ++e) {
        const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
        quantize_token_blocks(narrow, range, e, rounding, codes, scale);
      }
    };
    quantize(dh, parts, args.dh_columns, args.dh_columns_scale);
    quantize(pa, 1, args.pa_columns, args.pa_columns_scale);
    return Status();
  }
  Status status = write_rows(dh, rows * parts, hidden, rounding, args.dh, Tensor());
  return status.ok() ? write_rows(pa, rows, hidden, rounding, args.pa, Tensor()) : status;
} catch (...) {
  return exception_status("expert_down_backward");
}

Status expert_up_backward(const ExpertUpBackwardArgs& args) try {
  if (Status status = check(args); !status.ok()) return status;
  const int64_t rows = args.dh.dims[0];     // M
  const int64_t parts = args.dh.dims[1];    // P
  const int64_t hidden = args.dh.dims[2];   // I
  const int64_t width = args.gate.dims[1];  // H
  const int64_t num_experts = args.gate.dims[0];
  for (int64_t i = 0; i < rows * width; ++i) store(args.dx_rows, i, 0.0);
  for (int64_t e = 0; e < num_experts; ++e) {
    const RowRange range = rows_of_expert(args.offsets.as<int32_t>(), e, rows);
    if (range.size() == 0) continue;
    const Values gate_transposed = matrix_values(args.gate, args.gate_scale, e, true);  // [I, H]
    Values up_transposed;
    if (parts == 2) up_transposed = matrix_values(args.up, args.up_scale, e, true);
    for (int64_t row = range.begin; row < range.end; ++row) {
      Values dx(width, 0.0);
      add_product(row_values(args.dh, args.dh_scale, row * parts, hidden), gate_transposed, dx);
      if (parts == 2) {
        add_product(row_values(args.dh, args.dh_scale, row * 2 + 1, hidden), up_transposed, dx);
      }
      for (int64_t k = 0; k < width; ++k) store(args.dx_rows, row_index(row, k, width), dx[k]);
    }
  }
  return Status();
} catch (...) {
  return exception_status("expert_up_backward");
}

}  // namespace dropless::reference
