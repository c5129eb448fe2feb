#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products.h"
#include "cuda/launch/products_fp8.h"
#include "cuda/launch/products_sm80.h"

namespace dropless::cuda {

Status expert_down_backward(const ExpertDownBackwardArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.h.dims[0];
  if (args.dy.dtype == DType::kF8E4M3 && rows > 0) {
    return expert_down_backward_fp8(args, workspace, stream);
  }
  if (rows == 0 || args.down.dims[0] == 0) {
    DROPLESS_RETURN_IF_ERROR(zero_async("expert_down_backward", args.dh, stream));
    DROPLESS_RETURN_IF_ERROR(zero_async("expert_down_backward", args.pa, stream));
    return zero_async("expert_down_backward", args.d_weights, stream);
  }
  ProductPath path;
  DROPLESS_RETURN_IF_ERROR(choose_path("expert_down_backward", args.dy.dtype,
                                       {args.dy, args.down, args.h, args.dh, args.pa}, &path));
  DROPLESS_RETURN_IF_ERROR(check_count("expert_down_backward", "M", rows));
  if (args.h.dtype == DType::kF8E4M3 || args.dh_q.given()) {
    return Status(StatusCode::kUnimplemented,
                  "expert_down_backward: float8 h and dh have no kernel on this GPU yet");
  }
  DROPLESS_RETURN_IF_ERROR(check_workspace("expert_down_backward", workspace,
                                           expert_down_backward_workspace_bytes(args),
                                           kWorkspaceAlignment));
  float* row_sums = static_cast<float*>(workspace.data);
  switch (path) {
    case ProductPath::kSm80:
      return launch_expert_down_backward_sm80(args, row_sums, stream);
    case ProductPath::kF32:
      return launch_expert_down_backward_f32(args, row_sums, stream);
    case ProductPath::kSm90:
      break;
  }
  const int tile = expert_down_backward_sm90_tile(rows, args.down.dims[0], args.down.dims[1]);
  return launch_expert_down_backward_sm90(args, tile, row_sums, stream);
}

}  // namespace dropless::cuda
