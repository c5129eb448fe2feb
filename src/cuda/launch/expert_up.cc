#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {

Status expert_up(const ExpertUpArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.a.dims[0], width = args.a.dims[1], model = args.x.dims[1];
  if (rows == 0 || width == 0) return Status();
  DROPLESS_RETURN_IF_ERROR(check_sm90_bf16("expert_up", args.x.dtype));
  DROPLESS_RETURN_IF_ERROR(check_activation_kernel("expert_up", args.activation));
  DROPLESS_RETURN_IF_ERROR(check_count("expert_up", "M", rows));
  const bool biased = args.gate_bias.given() || args.up_bias.given();
  if (args.gate.dims[0] == 0 || (model == 0 && !biased)) {
    DROPLESS_RETURN_IF_ERROR(zero_async("expert_up", args.h, stream));
    return zero_async("expert_up", args.a, stream);
  }
  if (model == 0) {
    return Status(StatusCode::kUnimplemented,
                  "expert_up: H = 0 with a bias has no CUDA kernel; leave the biases out");
  }
  DROPLESS_RETURN_IF_ERROR(check_workspace("expert_up", workspace, expert_up_workspace_bytes(args),
                                           kWorkspaceAlignment));
  PermuteArgs permutation;
  permutation.x = args.x;
  permutation.slot_of_row = args.slot_of_row;
  permutation.experts_per_token = args.experts_per_token;
  permutation.rows = Tensor{workspace.data, DType::kBF16, 2, {rows, model, 0, 0}};
  DROPLESS_RETURN_IF_ERROR(permute(permutation, Tensor(), stream));
  return launch_expert_up_sm90(args, permutation.rows, stream);
}

}  // namespace dropless::cuda
