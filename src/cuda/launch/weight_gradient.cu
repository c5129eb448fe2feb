#include <cuda_runtime.h>

#include "cuda/kernels/weight_gradient_sum.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/weight_gradient.h"

namespace dropless::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
void launch_bias(const ExpertDownBackwardArgs& args, ConstTensor dy, const RowMap& map,
                 Stream stream) {
  const int m = static_cast<int>(args.h.dims[0]);
  weight_gradient_bias_kernel<T>
      <<<static_cast<unsigned>(ceil_div(m, kThreads / 32)), kThreads, 0, stream>>>(
          dy.as<T>(), map, args.down_bias.as<float>(), args.slot_of_row.as<int32_t>(),
          args.offsets.as<int32_t>(), static_cast<int>(args.down.dims[0]), m,
          static_cast<int>(args.d_weights.size()), static_cast<int>(args.down.dims[2]),
          args.d_weights.as<float>());
}

}  // namespace

Status launch_weight_gradient(const ExpertDownBackwardArgs& args, ConstTensor dy, const RowMap& map,
                              const float* row_sums, int tiles, Stream stream) {
  constexpr char kOp[] = "expert_down_backward";
  if (cudaMemsetAsync(args.d_weights.data, 0, args.d_weights.bytes(), stream) != cudaSuccess) {
    return launch_status(kOp);
  }
  const int m = static_cast<int>(args.h.dims[0]);
  weight_gradient_sum_kernel<<<static_cast<unsigned>(ceil_div(m, kThreads)), kThreads, 0, stream>>>(
      row_sums, args.slot_of_row.as<int32_t>(), args.offsets.as<int32_t>(),
      static_cast<int>(args.down.dims[0]), tiles, m, static_cast<int>(args.d_weights.size()),
      args.d_weights.as<float>());
  if (args.down_bias.given()) {
    dy.dtype == DType::kF32 ? launch_bias<float>(args, dy, map, stream)
                            : launch_bias<__nv_bfloat16>(args, dy, map, stream);
  }
  return launch_status(kOp);
}

}  // namespace dropless::cuda
