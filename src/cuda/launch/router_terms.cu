#include <cuda_runtime.h>

#include "cuda/kernels/router_terms.cuh"
#include "cuda/launch/launch.h"

namespace dropless::cuda {

Status router_terms(const RouterTermsArgs& args, Tensor, Stream stream) {
  DROPLESS_RETURN_IF_ERROR(check(args));
  if (args.a.size() == 0) return Status();
  constexpr int kThreads = 256;
  const TermsOut out = {args.terms.as<__nv_bfloat16>(), args.pairs.as<__nv_bfloat16>()};
  const auto blocks = static_cast<unsigned>(ceil_div(args.a.size(), kThreads));
  const int columns = static_cast<int>(args.a.dims[1]);
  const auto launch = [&](auto* kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(args.a.as<float>(), args.a.dims[0], columns, out);
  };
  args.side == ProductSide::kLeft ? launch(router_terms_kernel<ProductSide::kLeft>)
                                  : launch(router_terms_kernel<ProductSide::kRight>);
  return launch_status("router_terms");
}

}  // namespace dropless::cuda
