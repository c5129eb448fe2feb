#include "cuda/kernels/epilogue_dswiglu_fp8.cuh"
#include "cuda/kernels/weight_gradient_fp8.cuh"
#include "cuda/launch/experts_fp8_sm90.h"
#include "cuda/launch/grouped_gemm_fp8_sm90.cuh"

namespace dropless::cuda {
namespace {

// Shared memory holds four stages beside h and the results of a whole tile.
using Tile = Fp8Tile<128, 4, 1, 128>;

// dA' = dy * down^T: down [E, I, H] is K-major as it lies.
BlockedResult blocked_result(const Tensor& codes, const Tensor& scale) {
  return {static_cast<uint8_t*>(codes.data), scale.as<float>(), static_cast<int>(codes.dims[1]),
          static_cast<int>(codes.dims[2])};
}

template <ActivationKind kActivation, bool kColumns>
Status launch_product(const ExpertDownBackwardArgs& args, ConstTensor rows, ConstTensor row_scale,
                      float* row_sums, Stream stream) {
  using Epilogue = DswigluFp8Epilogue<kActivation, kColumns>;
  const int64_t m = rows.dims[0], width = args.down.dims[1];
  using Kernel = GroupedGemmFp8Sm90<Tile, Epilogue>;
  typename Kernel::Params params = {};
  Fp8Operands operands;
  operands.lhs = dense_stack(rows.data, DType::kF8E4M3, 1, m, rows.dims[1]);
  operands.lhs_name = "dy";
  operands.lhs_scale = row_scale.as<float>();
  operands.rhs[0] = args.down;
  operands.rhs_name[0] = operands.rhs_name[1] = "down";
  operands.rhs_scale[0] = args.down_scale.as<float>();
  DROPLESS_RETURN_IF_ERROR(set_fp8_operands<Kernel>(operands, args.offsets, &params));
  auto& epilogue = params.epilogue;
  MatrixStack h = {args.h.data, DType::kBF16, width, m, 2, 4 * width, 2 * width};
  DROPLESS_RETURN_IF_ERROR(encode_tensor_map(h, kChunk, "h", &epilogue.h));
  if constexpr (kColumns) {
    epilogue.dh_columns = blocked_result(args.dh_columns, args.dh_columns_scale);
    epilogue.pa_columns = blocked_result(args.pa_columns, args.pa_columns_scale);
  } else {
    h.data = args.dh.data;
    DROPLESS_RETURN_IF_ERROR(make_result(h, "dh", &epilogue.dh));
    DROPLESS_RETURN_IF_ERROR(
        make_result(dense_stack(args.pa.data, DType::kBF16, 1, m, width), "pa", &epilogue.pa));
  }
  if (args.dh_q.given()) {
    const MatrixStack q = {args.dh_q.data, DType::kF8E4M3, width, m, 2, 2 * width, width};
    DROPLESS_RETURN_IF_ERROR(make_result(q, "dh_q", &epilogue.dh_q));
  }
  epilogue.dh_scale = args.dh_scale.as<float>();
  epilogue.row_sums = row_sums;
  epilogue.weights = args.weights.as<float>();
  epilogue.slot_of_row = args.slot_of_row.as<int32_t>();
  epilogue.offsets = args.offsets.as<int32_t>();
  epilogue.rows = static_cast<int>(m);
  epilogue.blocks = static_cast<int>(ceil_div(width, kScaleBlock));
  epilogue.rounding = args.scale_rounding;
  return launch_fp8_product<Tile, Epilogue>(params, stream);
}

template <ActivationKind kActivation>
Status launch_product(const ExpertDownBackwardArgs& args, ConstTensor rows, ConstTensor row_scale,
                      float* row_sums, Stream stream) {
  return args.dh_columns.given()
             ? launch_product<kActivation, true>(args, rows, row_scale, row_sums, stream)
             : launch_product<kActivation, false>(args, rows, row_scale, row_sums, stream);
}

Status launch_d_weights(const ExpertDownBackwardArgs& args, ConstTensor rows, ConstTensor row_scale,
                        const float* row_sums, Stream stream) {
  cudaError_t error = cudaMemsetAsync(args.d_weights.data, 0, args.d_weights.bytes(), stream);
  if (error != cudaSuccess) return cuda_status(error, "cudaMemsetAsync");
  WeightGradientFp8Params params = {};
  params.row_sums = row_sums;
  params.dy = rows.as<__nv_fp8_e4m3>();
  params.dy_scale = row_scale.as<float>();
  params.bias = args.down_bias.as<float>();
  params.slot_of_row = args.slot_of_row.as<int32_t>();
  params.offsets = args.offsets.as<int32_t>();
  params.d_weights = args.d_weights.as<float>();
  params.experts = static_cast<int>(args.down.dims[0]);
  params.tiles = static_cast<int>(ceil_div(args.down.dims[1], Tile::kCols));
  params.rows = static_cast<int>(rows.dims[0]);
  params.width = static_cast<int>(rows.dims[1]);
  params.slots = static_cast<int>(args.weights.size());
  constexpr int kThreads = 256;
  const int64_t blocks = ceil_div(rows.dims[0] * kWarpSize, kThreads);
  weight_gradient_fp8_kernel<kThreads>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "weight_gradient_fp8");
}

}  // namespace

Status launch_expert_down_backward_fp8_sm90(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                            ConstTensor row_scale, float* row_sums, Stream stream) {
  Status status;
  switch (args.activation.kind) {
    case ActivationKind::kSilu:
      status = launch_product<ActivationKind::kSilu>(args, rows, row_scale, row_sums, stream);
      break;
    case ActivationKind::kGelu:
      status = launch_product<ActivationKind::kGelu>(args, rows, row_scale, row_sums, stream);
      break;
    case ActivationKind::kGeluTanh:
      status = launch_product<ActivationKind::kGeluTanh>(args, rows, row_scale, row_sums, stream);
      break;
    default:  // fp8_has_activation: no other comes here
      break;
  }
  return status.ok() ? launch_d_weights(args, rows, row_scale, row_sums, stream) : status;
}

}  // namespace dropless::cuda
