#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {

Status expert_down_backward(const ExpertDownBackwardArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.h.dims[0], width = args.h.dims[2], model = args.dy.dims[1];
  if (rows == 0 || args.down.dims[0] == 0 || width == 0 || model == 0) {
    if (rows > 0 && width == 0 && args.down_bias.given()) {
      return Status(StatusCode::kUnimplemented,
                    "expert_down_backward: I = 0 with a bias has no CUDA kernel; leave it out");
    }
    DROPLESS_RETURN_IF_ERROR(zero_async("expert_down_backward", args.dh, stream));
    DROPLESS_RETURN_IF_ERROR(zero_async("expert_down_backward", args.pa, stream));
    return zero_async("expert_down_backward", args.d_weights, stream);
  }
  DROPLESS_RETURN_IF_ERROR(check_sm90_bf16("expert_down_backward", args.dy.dtype));
  DROPLESS_RETURN_IF_ERROR(check_activation_kernel("expert_down_backward", args.activation));
  DROPLESS_RETURN_IF_ERROR(check_count("expert_down_backward", "M", rows));
  if (args.h.dtype != DType::kBF16 || args.dh_q.given()) {
    return Status(StatusCode::kUnimplemented,
                  "expert_down_backward: float8 h and dh have no kernel on this GPU yet");
  }
  DROPLESS_RETURN_IF_ERROR(check_workspace("expert_down_backward", workspace,
                                           expert_down_backward_workspace_bytes(args),
                                           kWorkspaceAlignment));
  return launch_expert_down_backward_sm90(args, static_cast<float*>(workspace.data), stream);
}

}  // namespace dropless::cuda
