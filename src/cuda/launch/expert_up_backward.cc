#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {

Status expert_up_backward(const ExpertUpBackwardArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.dh.dims[0], width = args.dh.dims[2];
  if (args.dx_rows.size() == 0) return Status();
  DROPLESS_RETURN_IF_ERROR(check_sm90_bf16("expert_up_backward", args.dh.dtype));
  DROPLESS_RETURN_IF_ERROR(check_count("expert_up_backward", "M", rows));
  if (!args.up.given()) {
    return Status(StatusCode::kUnimplemented,
                  "expert_up_backward: gated=False has no CUDA kernel yet");
  }
  if (args.gate.dims[0] == 0 || width == 0) {
    return zero_async("expert_up_backward", args.dx_rows, stream);
  }
  const int tile = grouped_gemm_sm90_tile(2 * width, args.dx_rows.dims[1]);
  return launch_expert_up_backward_sm90(args, tile, stream);
}

}  // namespace dropless::cuda
