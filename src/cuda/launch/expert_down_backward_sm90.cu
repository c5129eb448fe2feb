#include "cuda/kernels/epilogue_dswiglu.cuh"
#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/kernels/weight_gradient_sum.cuh"
#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {
namespace {

Status make_rows(const MatrixStack& stack, const char* name, RowMatrix* rows) {
  rows->data = static_cast<uint8_t*>(const_cast<void*>(stack.data));
  rows->row_bytes = stack.row_bytes;
  rows->plane_bytes = stack.plane_bytes;
  rows->cols = static_cast<int>(stack.cols);
  return check_tma(stack, name);
}

// dA' = dy * down^T: down [E, I, H] is K-major as it lies.
template <ActivationKind kActivation>
Status launch_product(const ExpertDownBackwardArgs& args, float* row_sums, Stream stream) {
  using Tile = ExpertDownBackwardSm90Tile;
  using Epilogue = DswigluEpilogue<kActivation>;
  using Kernel = GroupedGemmSm90<Tile, Major::kK, Epilogue, Gathered::kLhs>;
  const int64_t m = args.h.dims[0], model = args.dy.dims[1];
  const int64_t experts = args.down.dims[0], width = args.down.dims[1];
  typename Kernel::Params params = {};
  Status status =
      make_row_source(args.dy, model, args.slot_of_row, args.weights.dims[1], "dy", &params.source);
  if (status.ok()) {
    status = encode_tensor_map(dense_stack(args.down.data, DType::kBF16, experts, width, model),
                               kChunk, "down", &params.rhs[0]);
  }
  params.rhs[1] = params.rhs[0];
  const MatrixStack h = {args.h.data, DType::kBF16, width, m, 2, 4 * width, 2 * width};
  MatrixStack dh = h;
  dh.data = args.dh.data;
  if (status.ok()) status = make_rows(h, "h", &params.epilogue.h);
  if (status.ok()) status = make_rows(dh, "dh", &params.epilogue.dh);
  if (status.ok()) {
    status =
        make_rows(dense_stack(args.pa.data, DType::kBF16, 1, m, width), "pa", &params.epilogue.pa);
  }
  if (!status.ok()) return status;
  params.epilogue.row_sums = row_sums;
  params.epilogue.weights = args.weights.as<float>();
  params.epilogue.slot_of_row = args.slot_of_row.as<int32_t>();
  params.epilogue.rows = static_cast<int>(m);
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.rows = static_cast<int>(m);
  params.cols = static_cast<int>(width);
  params.blocks = static_cast<int>(ceil_div(model, kChunk));
  params.planes = 1;
  const int64_t most_items =
      (ceil_div(m, Tile::kRows) + std::min(experts, m)) * ceil_div(width, Tile::kCols);
  return launch_persistent(&grouped_gemm_sm90_kernel<Tile, Major::kK, Epilogue, Gathered::kLhs>,
                           params, Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, most_items,
                           stream);
}

Status launch_d_weights(const ExpertDownBackwardArgs& args, const float* row_sums, int tiles,
                        Stream stream) {
  cudaError_t error = cudaMemsetAsync(args.d_weights.data, 0, args.d_weights.bytes(), stream);
  if (error != cudaSuccess) return cuda_status(error, "cudaMemsetAsync");
  constexpr int kThreads = 256;
  const int m = static_cast<int>(args.h.dims[0]), experts = static_cast<int>(args.down.dims[0]);
  weight_gradient_sum_kernel<<<static_cast<unsigned>(ceil_div(m, kThreads)), kThreads, 0, stream>>>(
      row_sums, args.slot_of_row.as<int32_t>(), args.offsets.as<int32_t>(), experts, tiles, m,
      args.d_weights.as<float>());
  if (args.down_bias.given()) {
    weight_gradient_bias_kernel<<<static_cast<unsigned>(ceil_div(m, kThreads / 32)), kThreads, 0,
                                  stream>>>(
        args.dy.as<__nv_bfloat16>(),
        RowMap{args.slot_of_row.as<int32_t>(), Divisor::of(args.weights.dims[1]),
               static_cast<int>(args.dy.dims[0])},
        args.down_bias.as<float>(), args.slot_of_row.as<int32_t>(), args.offsets.as<int32_t>(),
        experts, m, static_cast<int>(args.dy.dims[1]), args.d_weights.as<float>());
  }
  return cuda_status(cudaGetLastError(), "weight_gradient_sum");
}

}  // namespace

Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, float* row_sums,
                                        Stream stream) {
  Status status;
  switch (args.activation.kind) {
    case ActivationKind::kSilu:
      status = launch_product<ActivationKind::kSilu>(args, row_sums, stream);
      break;
    case ActivationKind::kGelu:
      status = launch_product<ActivationKind::kGelu>(args, row_sums, stream);
      break;
    case ActivationKind::kGeluTanh:
      status = launch_product<ActivationKind::kGeluTanh>(args, row_sums, stream);
      break;
    default:  // check_activation_kernel has refused what has no epilogue
      break;
  }
  if (!status.ok()) return status;
  const int tiles = static_cast<int>(ceil_div(args.down.dims[1], kDownBackwardTileCols));
  return launch_d_weights(args, row_sums, tiles, stream);
}

}  // namespace dropless::cuda
