#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products.h"
#include "cuda/launch/products_fp8.h"
#include "cuda/launch/products_sm80.h"

namespace dropless::cuda {

Status expert_up_backward(const ExpertUpBackwardArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.dh.dims[0], width = args.dh.dims[2];
  if (args.dx_rows.size() == 0) return Status();
  if (args.dh.dtype == DType::kF8E4M3) return expert_up_backward_fp8(args, stream);
  ProductPath path;
  DROPLESS_RETURN_IF_ERROR(choose_path("expert_up_backward", args.dh.dtype,
                                       {args.dh, args.gate, args.up, args.dx_rows}, &path));
  DROPLESS_RETURN_IF_ERROR(check_count("expert_up_backward", "M", rows));
  if (args.gate.dims[0] == 0 || width == 0) {
    return zero_async("expert_up_backward", args.dx_rows, stream);
  }
  if (path == ProductPath::kSm80) return launch_expert_up_backward_sm80(args, stream);
  if (path == ProductPath::kF32) return launch_expert_up_backward_f32(args, stream);
  const int tile = grouped_gemm_sm90_tile(rows, args.gate.dims[0], args.dh.dims[1] * width,
                                          args.dx_rows.dims[1]);
  return launch_expert_up_backward_sm90(args, tile, stream);
}

}  // namespace dropless::cuda
