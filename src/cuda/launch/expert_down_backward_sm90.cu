#include "cuda/kernels/weight_gradient_sum.cuh"
#include "cuda/launch/expert_down_backward_sm90.cuh"

namespace dropless::cuda {
namespace {

Status launch_d_weights(const ExpertDownBackwardArgs& args, ConstTensor rows, const float* row_sums,
                        int tiles, Stream stream) {
  cudaError_t error = cudaMemsetAsync(args.d_weights.data, 0, args.d_weights.bytes(), stream);
  if (error != cudaSuccess) return cuda_status(error, "cudaMemsetAsync");
  constexpr int kThreads = 256;
  const int m = static_cast<int>(rows.dims[0]), experts = static_cast<int>(args.down.dims[0]);
  weight_gradient_sum_kernel<<<static_cast<unsigned>(ceil_div(m, kThreads)), kThreads, 0, stream>>>(
      row_sums, args.slot_of_row.as<int32_t>(), args.offsets.as<int32_t>(), experts, tiles, m,
      args.d_weights.as<float>());
  if (args.down_bias.given()) {
    weight_gradient_bias_kernel<<<static_cast<unsigned>(ceil_div(m, kThreads / 32)), kThreads, 0,
                                  stream>>>(
        rows.as<__nv_bfloat16>(), args.down_bias.as<float>(), args.slot_of_row.as<int32_t>(),
        args.offsets.as<int32_t>(), experts, m, static_cast<int>(rows.dims[1]),
        args.d_weights.as<float>());
  }
  return cuda_status(cudaGetLastError(), "weight_gradient_sum");
}

}  // namespace

Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                        float* row_sums, int tile, Stream stream) {
  const Status status = launch_expert_down_backward_all<ActivationKind::kSilu>(args, rows, row_sums,
                                                                               tile, stream);
  if (!status.ok()) return status;
  const int tiles = static_cast<int>(ceil_div(args.down.dims[1], kDownBackwardTileCols));
  return launch_d_weights(args, rows, row_sums, tiles, stream);
}

}  // namespace dropless::cuda
