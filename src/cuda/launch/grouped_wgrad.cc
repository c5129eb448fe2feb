#include "cuda/launch/grouped_wgrad_fp8_sm90.h"
#include "cuda/launch/grouped_wgrad_sm90.h"
#include "cuda/launch/permute_groups.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products.h"
#include "cuda/launch/products_sm80.h"
#include "cuda/launch/quantize_columns.h"

namespace dropless::cuda {
namespace {

// Quantises both operands into the workspace, gathered on the way, and multiplies them.
Status grouped_wgrad_fp8(const GroupedWgradArgs& args, int64_t rows, const Tensor& workspace,
                         Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check_workspace(
      "grouped_wgrad", workspace, grouped_wgrad_workspace_bytes(args), kWorkspaceAlignment));
  const int64_t experts = args.dw[0].dims[0];
  auto* next = static_cast<uint8_t*>(workspace.data);
  const auto quantize = [&](const ConstTensor& operand, const ConstTensor& scale, int64_t planes,
                            int64_t width, bool gather, const uint8_t** codes,
                            const float** scales) {
    if (scale.given()) {
      *codes = static_cast<const uint8_t*>(operand.data);
      *scales = scale.as<float>();
      return Status();
    }
    const BlockedOperand blocked(rows, experts, planes, width);
    QuantizeColumnsArgs columns;
    columns.x = operand;
    columns.x.rank = 3;
    columns.x.dims[1] = planes;
    columns.x.dims[2] = width;
    if (gather) columns.slot_of_row = args.slot_of_row;
    columns.offsets = args.offsets;
    columns.rows = rows;
    columns.experts_per_token = args.experts_per_token;
    columns.scale_rounding = args.scale_rounding;
    columns.codes = next;
    next += align_workspace(blocked.code_bytes());
    columns.scales = reinterpret_cast<float*>(next);
    next += align_workspace(blocked.scale_bytes());
    *codes = static_cast<const uint8_t*>(columns.codes);
    *scales = columns.scales;
    return quantize_columns(columns, stream);
  };
  WgradFp8Scratch scratch;
  DROPLESS_RETURN_IF_ERROR(quantize(args.x, args.x_scale, 1, args.dw[0].dims[1],
                                    args.gather == Gather::kLhs, &scratch.x, &scratch.x_scale));
  DROPLESS_RETURN_IF_ERROR(quantize(args.dy, args.dy_scale, args.dy.dims[1], args.dw[0].dims[2],
                                    args.gather == Gather::kRhs, &scratch.dy, &scratch.dy_scale));
  return launch_grouped_wgrad_fp8_sm90(args, rows, scratch, 0, stream);
}

}  // namespace

Status grouped_wgrad(const GroupedWgradArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.dw[0].size() == 0) return Status();
  ProductPath path = ProductPath::kSm90;
  if (args.fp8) {
    // The quantiser takes float32 operands too.
    DROPLESS_RETURN_IF_ERROR(check_sm90_bf16("grouped_wgrad", DType::kBF16));
  } else {
    DROPLESS_RETURN_IF_ERROR(choose_path("grouped_wgrad", args.x.dtype,
                                         {args.x, args.dy, args.dw[0], args.dw[1]}, &path));
  }
  const int64_t rows = args.gather == Gather::kNone ? args.x.dims[0] : args.slot_of_row.dims[0];
  DROPLESS_RETURN_IF_ERROR(check_count("grouped_wgrad", "M", rows));
  if (rows == 0) {
    if (args.accumulate) return Status();
    DROPLESS_RETURN_IF_ERROR(zero_async("grouped_wgrad", args.dw[0], stream));
    return zero_async("grouped_wgrad", args.dw[1], stream);
  }
  if (args.fp8) return grouped_wgrad_fp8(args, rows, workspace, stream);
  if (path == ProductPath::kSm80) return launch_grouped_wgrad_sm80(args, stream);
  if (path == ProductPath::kF32) return launch_grouped_wgrad_f32(args, stream);
  GroupedWgradArgs contiguous = args;
  const bool left = args.gather == Gather::kLhs;
  const int64_t other_cols = left ? args.dy.dims[1] * args.dy.dims[2] : args.x.dims[1];
  const int64_t experts = args.dw[0].dims[0];
  if (args.gather != Gather::kNone &&
      !grouped_wgrad_sm90_gathers(left, rows, experts, other_cols)) {
    const ConstTensor from = left ? args.x : args.dy;
    const int64_t width = left ? from.dims[1] : from.dims[1] * from.dims[2];
    DROPLESS_RETURN_IF_ERROR(
        check_workspace("grouped_wgrad", workspace, rows * width * 2, kWorkspaceAlignment));
    PermuteArgs permutation;
    permutation.x = bf16_matrix(from.data, from.dims[0], width);
    permutation.slot_of_row = args.slot_of_row;
    permutation.experts_per_token = args.experts_per_token;
    permutation.rows = Tensor{workspace.data, DType::kBF16, 2, {rows, width, 0, 0}};
    DROPLESS_RETURN_IF_ERROR(permute_groups(permutation, args.offsets, stream));
    ConstTensor& gathered = left ? contiguous.x : contiguous.dy;
    gathered.data = workspace.data;
    gathered.dims[0] = rows;
    contiguous.gather = Gather::kNone;
  }
  const int tile = grouped_wgrad_sm90_tile(rows, experts, args.dy.dims[2]);
  return launch_grouped_wgrad_sm90(contiguous, tile, stream);
}

}  // namespace dropless::cuda
