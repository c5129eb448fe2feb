#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products.h"
#include "cuda/launch/products_fp8.h"
#include "cuda/launch/products_sm80.h"

namespace dropless::cuda {

Status expert_up(const ExpertUpArgs& args, Tensor workspace, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.a.dims[0], width = args.a.dims[1];
  if (rows == 0 || width == 0) return Status();
  if (args.x.dtype == DType::kF8E4M3) return expert_up_fp8(args, workspace, stream);
  ProductPath path;
  DROPLESS_RETURN_IF_ERROR(choose_path(
      "expert_up", args.x.dtype,
      {args.x, args.gate, args.up, args.gate_bias, args.up_bias, args.h, args.a}, &path));
  DROPLESS_RETURN_IF_ERROR(check_count("expert_up", "M", rows));
  if (args.gate.dims[0] == 0) {
    DROPLESS_RETURN_IF_ERROR(zero_async("expert_up", args.h, stream));
    return zero_async("expert_up", args.a, stream);
  }
  if (path == ProductPath::kSm80) return launch_expert_up_sm80(args, stream);
  if (path == ProductPath::kF32) return launch_expert_up_f32(args, stream);
  return launch_expert_up_sm90(args, stream);
}

}  // namespace dropless::cuda
