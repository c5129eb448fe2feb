#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/products.h"

namespace dropless::cuda {

Status grouped_gemm(const GroupedGemmArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.lhs.dims[0], contraction = args.lhs.dims[1], cols = args.out.dims[1];
  if (rows == 0 || cols == 0) return Status();
  DROPLESS_RETURN_IF_ERROR(check_sm90_bf16("grouped_gemm", args.lhs.dtype));
  DROPLESS_RETURN_IF_ERROR(check_count("grouped_gemm", "M", rows));
  if (args.rhs.dims[0] == 0) return zero_async("grouped_gemm", args.out, stream);
  if (contraction == 0) {
    if (!args.bias.given()) return zero_async("grouped_gemm", args.out, stream);
    return Status(StatusCode::kUnimplemented,
                  "grouped_gemm: Kc = 0 with a bias has no CUDA kernel; leave the bias out");
  }
  return launch_grouped_gemm_sm90(args, grouped_gemm_sm90_tile(contraction, cols), stream);
}

}  // namespace dropless::cuda
