#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/product_path.h"
#include "cuda/launch/products.h"
#include "cuda/launch/products_fp8.h"
#include "cuda/launch/products_sm80.h"

namespace dropless::cuda {

Status grouped_gemm(const GroupedGemmArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  const int64_t rows = args.lhs.dims[0], contraction = args.lhs.dims[1], cols = args.out.dims[1];
  if (rows == 0 || cols == 0) return Status();
  if (args.lhs.dtype == DType::kF8E4M3) return grouped_gemm_fp8(args, stream);
  ProductPath path;
  DROPLESS_RETURN_IF_ERROR(choose_path("grouped_gemm", args.lhs.dtype,
                                       {args.lhs, args.rhs, args.bias, args.out}, &path));
  DROPLESS_RETURN_IF_ERROR(check_count("grouped_gemm", "M", rows));
  if (args.rhs.dims[0] == 0) return zero_async("grouped_gemm", args.out, stream);
  switch (path) {
    case ProductPath::kSm80:
      return launch_grouped_gemm_sm80(args, stream);
    case ProductPath::kF32:
      return launch_grouped_gemm_f32(args, stream);
    case ProductPath::kSm90:
      break;
  }
  const int tile = grouped_gemm_sm90_tile(rows, args.rhs.dims[0], contraction, cols);
  return launch_grouped_gemm_sm90(args, tile, stream);
}

}  // namespace dropless::cuda
