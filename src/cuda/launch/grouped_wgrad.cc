#include "cuda/launch/grouped_wgrad_sm90.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {

Status grouped_wgrad(const GroupedWgradArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.dw[0].size() == 0) return Status();
  DROPLESS_RETURN_IF_ERROR(check_sm90_bf16("grouped_wgrad", args.x.dtype));
  if (args.fp8) {
    return Status(StatusCode::kUnimplemented,
                  "grouped_wgrad: fp8 has no kernel on this GPU yet; bfloat16 has");
  }
  const int64_t rows = (args.gather == Gather::kLhs ? args.dy : args.x).dims[0];
  DROPLESS_RETURN_IF_ERROR(check_count("grouped_wgrad", "M", rows));
  if (rows == 0) {
    if (args.accumulate) return Status();
    DROPLESS_RETURN_IF_ERROR(zero_async("grouped_wgrad", args.dw[0], stream));
    return zero_async("grouped_wgrad", args.dw[1], stream);
  }
  GroupedWgradArgs contiguous = args;
  const bool left = args.gather == Gather::kLhs;
  const int64_t other_cols = left ? args.dy.dims[1] * args.dy.dims[2] : args.x.dims[1];
  if (args.gather != Gather::kNone && !grouped_wgrad_sm90_gathers(other_cols)) {
    const ConstTensor from = left ? args.x : args.dy;
    const int64_t width = left ? from.dims[1] : from.dims[1] * from.dims[2];
    DROPLESS_RETURN_IF_ERROR(
        check_workspace("grouped_wgrad", workspace, rows * width * 2, kWorkspaceAlignment));
    PermuteArgs permutation;
    permutation.x = bf16_matrix(from.data, from.dims[0], width);
    permutation.slot_of_row = args.slot_of_row;
    permutation.experts_per_token = args.experts_per_token;
    permutation.rows = Tensor{workspace.data, DType::kBF16, 2, {rows, width, 0, 0}};
    DROPLESS_RETURN_IF_ERROR(permute(permutation, Tensor(), stream));
    ConstTensor& gathered = left ? contiguous.x : contiguous.dy;
    gathered.data = workspace.data;
    gathered.dims[0] = rows;
    contiguous.gather = Gather::kNone;
  }
  const int tile = grouped_wgrad_sm90_tile(args.dy.dims[2]);
  return launch_grouped_wgrad_sm90(contiguous, tile, stream);
}

}  // namespace dropless::cuda
