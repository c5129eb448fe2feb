#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {

Status expert_up(const ExpertUpArgs& args, Tensor, Stream stream) {
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
  return launch_expert_up_sm90(args, stream);
}

}  // namespace dropless::cuda
