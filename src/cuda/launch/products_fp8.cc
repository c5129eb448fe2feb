#include "cuda/launch/products_fp8.h"

#include <initializer_list>
#include <string>

#include "cuda/launch/experts_fp8_sm90.h"
#include "cuda/launch/grouped_gemm_fp8_sm90.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {
namespace {

Status check_hopper(const char* op) {
  const DeviceProperties* device = nullptr;
  DROPLESS_RETURN_IF_ERROR(current_device(&device));
  if (device->compute_capability == 90) return Status();
  return Status(StatusCode::kUnimplemented,
                std::string(op) +
                    ": float8 operands need compute capability 9.0, but this GPU has " +
                    std::to_string(device->compute_capability / 10) + "." +
                    std::to_string(device->compute_capability % 10));
}

// TMA addresses rows and bases in units of 16 bytes; there is no other kernel for float8 operands.
Status check_addressable(const char* op, std::initializer_list<ConstTensor> arrays) {
  if (common_alignment(arrays) == 16) return Status();
  return Status(StatusCode::kUnimplemented,
                std::string(op) +
                    ": float8 operands need arrays whose base and rows are multiples of 16 bytes"
                    " (H and I multiples of 16); bfloat16 ones have a kernel for every size");
}

Status check_activation(const char* op, const ActivationOptions& activation) {
  if (fp8_has_activation(activation)) return Status();
  return Status(StatusCode::kUnimplemented,
                std::string(op) +
                    ": float8 operands have kernels for gated silu, gelu and gelu_tanh without"
                    " slope, limits or offset only; bfloat16 ones have all activations");
}

// Tensor cores read float8 with the contraction innermost only.
Status check_transposed(const char* op, bool transposed, const char* flag) {
  if (transposed) return Status();
  return Status(
      StatusCode::kUnimplemented,
      std::string(op) + ": float8 weights must have the contraction last (" + flag + " = true)");
}

Status unimplemented_bias(const char* op, const char* size) {
  return Status(
      StatusCode::kUnimplemented,
      std::string(op) + ": " + size + " = 0 with a bias has no CUDA kernel; leave it out");
}

// Codes and scales of rows that are looked up by slot, in row order.
struct GatheredRows {
  Tensor rows;   // [M, H] float8
  Tensor scale;  // [M, ceil(H/128)]
  void* end;     // of the workspace's used part
};

Status gather_rows(const ConstTensor& x, const ConstTensor& x_scale, const ConstTensor& slot_of_row,
                   int64_t experts_per_token, const Tensor& workspace, Stream stream,
                   GatheredRows* out) {
  const int64_t tokens = x.dims[0], m = slot_of_row.dims[0], width = x.dims[1];
  const int64_t blocks = x_scale.dims[1];
  uint8_t* data = static_cast<uint8_t*>(workspace.data);
  out->rows = Tensor{data, DType::kF8E4M3, 2, {m, width, 0, 0}};
  data += align_workspace(m * width);
  out->scale = Tensor{data, DType::kF32, 2, {m, blocks, 0, 0}};
  out->end = data + align_workspace(m * blocks * 4);
  // A permutation moves bits: codes travel as words of four.
  PermuteArgs codes, scales;
  codes.x = ConstTensor{x.data, DType::kF32, 2, {tokens, width / 4, 0, 0}};
  codes.rows = Tensor{out->rows.data, DType::kF32, 2, {m, width / 4, 0, 0}};
  scales.x = x_scale;
  scales.rows = out->scale;
  for (PermuteArgs* args : {&codes, &scales}) {
    args->slot_of_row = slot_of_row;
    args->experts_per_token = experts_per_token;
    DROPLESS_RETURN_IF_ERROR(permute(*args, Tensor(), stream));
  }
  return Status();
}

}  // namespace

Status grouped_gemm_fp8(const GroupedGemmArgs& args, Stream stream) {
  const char* op = "grouped_gemm";
  DROPLESS_RETURN_IF_ERROR(check_hopper(op));
  DROPLESS_RETURN_IF_ERROR(check_transposed(op, args.rhs_transposed, "rhs_transposed"));
  DROPLESS_RETURN_IF_ERROR(check_count(op, "M", args.lhs.dims[0]));
  DROPLESS_RETURN_IF_ERROR(check_addressable(op, {args.lhs, args.rhs, args.bias, args.out}));
  if (args.rhs.dims[0] == 0) return zero_async(op, args.out, stream);
  if (args.lhs.dims[1] == 0) {
    return args.bias.given() ? unimplemented_bias(op, "Kc") : zero_async(op, args.out, stream);
  }
  const int tile = grouped_gemm_fp8_sm90_tile(args.lhs.dims[1], args.out.dims[1]);
  return launch_grouped_gemm_fp8_sm90(args, tile, stream);
}

Status expert_up_fp8(const ExpertUpArgs& args, Tensor workspace, Stream stream) {
  const char* op = "expert_up";
  DROPLESS_RETURN_IF_ERROR(check_hopper(op));
  DROPLESS_RETURN_IF_ERROR(check_transposed(op, args.weights_transposed, "weights_transposed"));
  DROPLESS_RETURN_IF_ERROR(check_activation(op, args.activation));
  DROPLESS_RETURN_IF_ERROR(check_count(op, "M", args.a.dims[0]));
  DROPLESS_RETURN_IF_ERROR(check_addressable(
      op, {args.x, args.gate, args.up, args.gate_bias, args.up_bias, args.h, args.a}));
  if (args.gate.dims[0] == 0 || args.x.dims[1] == 0) {
    return Status(StatusCode::kUnimplemented, "expert_up: float8 operands need E > 0 and H > 0");
  }
  DROPLESS_RETURN_IF_ERROR(
      check_workspace(op, workspace, expert_up_workspace_bytes(args), kWorkspaceAlignment));
  GatheredRows x;
  DROPLESS_RETURN_IF_ERROR(gather_rows(args.x, args.x_scale, args.slot_of_row,
                                       args.experts_per_token, workspace, stream, &x));
  return launch_expert_up_fp8_sm90(args, x.rows, x.scale, stream);
}

Status expert_down_backward_fp8(const ExpertDownBackwardArgs& args, Tensor workspace,
                                Stream stream) {
  const char* op = "expert_down_backward";
  DROPLESS_RETURN_IF_ERROR(check_hopper(op));
  DROPLESS_RETURN_IF_ERROR(check_activation(op, args.activation));
  DROPLESS_RETURN_IF_ERROR(check_count(op, "M", args.h.dims[0]));
  DROPLESS_RETURN_IF_ERROR(
      check_addressable(op, {args.dy, args.down, args.h, args.dh, args.dh_q, args.pa}));
  if (args.down.dims[0] == 0 || args.down.dims[1] == 0 || args.dy.dims[1] == 0) {
    return Status(StatusCode::kUnimplemented,
                  "expert_down_backward: float8 operands need E > 0, H > 0 and I > 0");
  }
  if (args.h.dtype != DType::kBF16) {
    return Status(StatusCode::kUnimplemented,
                  "expert_down_backward: float8 h has no kernel on this GPU yet; bfloat16 has");
  }
  DROPLESS_RETURN_IF_ERROR(check_workspace(
      op, workspace, expert_down_backward_workspace_bytes(args), kWorkspaceAlignment));
  if (args.dh_columns.given() &&
      !(is_aligned(args.dh_columns.data, 16) && is_aligned(args.pa_columns.data, 16))) {
    return Status(StatusCode::kInvalidArgument,
                  "expert_down_backward: dh_columns and pa_columns must start at multiples of 16"
                  " bytes");
  }
  GatheredRows dy;
  DROPLESS_RETURN_IF_ERROR(gather_rows(args.dy, args.dy_scale, args.slot_of_row,
                                       args.weights.dims[1], workspace, stream, &dy));
  return launch_expert_down_backward_fp8_sm90(args, dy.rows, dy.scale, static_cast<float*>(dy.end),
                                              stream);
}

Status expert_up_backward_fp8(const ExpertUpBackwardArgs& args, Stream stream) {
  const char* op = "expert_up_backward";
  DROPLESS_RETURN_IF_ERROR(check_hopper(op));
  DROPLESS_RETURN_IF_ERROR(check_count(op, "M", args.dh.dims[0]));
  DROPLESS_RETURN_IF_ERROR(check_addressable(op, {args.dh, args.gate, args.up, args.dx_rows}));
  if (!args.up.given()) {
    return Status(StatusCode::kUnimplemented,
                  "expert_up_backward: float8 operands need gated experts; bfloat16 ones do not");
  }
  const int64_t width = args.dh.dims[2];
  if (args.gate.dims[0] == 0 || width == 0) return zero_async(op, args.dx_rows, stream);
  const int tile = grouped_gemm_fp8_sm90_tile(2 * width, args.dx_rows.dims[1]);
  return launch_expert_up_backward_fp8_sm90(args, tile, stream);
}

}  // namespace dropless::cuda
