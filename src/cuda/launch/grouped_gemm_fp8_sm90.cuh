// Shared by the launches of the FP8 products on sm_90a.
#pragma once

#include "cuda/kernels/epilogue_store_fp8.cuh"
#include "cuda/kernels/grouped_gemm_fp8_sm90.cuh"
#include "cuda/launch/grouped_gemm_fp8_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {

// Operands of one product: lhs [planes, M, Kc] with scales, and a stack [E, N, Kc] with scales for
// each plane, or for each of gate and up.
struct Fp8Operands {
  MatrixStack lhs;
  const char* lhs_name = "lhs";
  const float* lhs_scale = nullptr;
  ConstTensor rhs[2];
  const char* rhs_name[2] = {"rhs", "rhs"};
  const float* rhs_scale[2] = {nullptr, nullptr};
};

// Fills in everything but the epilogue's parameters. offsets [E+1].
template <class Kernel>
Status set_fp8_operands(const Fp8Operands& operands, const ConstTensor& offsets,
                        typename Kernel::Params* params) {
  DROPLESS_RETURN_IF_ERROR(
      encode_tensor_map(operands.lhs, kChunk, operands.lhs_name, &params->lhs));
  for (int i = 0; i < 2; ++i) {
    const ConstTensor& rhs = operands.rhs[i].given() ? operands.rhs[i] : operands.rhs[0];
    DROPLESS_RETURN_IF_ERROR(encode_tensor_map(
        dense_stack(rhs.data, DType::kF8E4M3, rhs.dims[0], rhs.dims[1], rhs.dims[2]),
        Kernel::kRhsBox, operands.rhs_name[i], &params->rhs[i]));
    params->rhs_scale[i] = operands.rhs_scale[operands.rhs[i].given() ? i : 0];
  }
  params->lhs_scale = operands.lhs_scale;
  params->offsets = offsets.as<int32_t>();
  params->experts = static_cast<int>(offsets.dims[0] - 1);
  params->rows = static_cast<int>(operands.lhs.rows);
  params->cols = static_cast<int>(operands.rhs[0].dims[1]);
  params->blocks = static_cast<int>(ceil_div(operands.lhs.cols, kScaleBlock));
  params->planes = static_cast<int>(operands.lhs.planes);
  return Status();
}

template <class Tile, class Epilogue>
Status launch_fp8_product(const GroupedGemmFp8Params<typename Epilogue::Params>& params,
                          Stream stream) {
  using Kernel = GroupedGemmFp8Sm90<Tile, Epilogue>;
  const int64_t most_items =
      (ceil_div(params.rows, Tile::kRows) + std::min(params.experts, params.rows)) *
      ceil_div(params.cols, Kernel::kTileCols);
  return launch_persistent(&grouped_gemm_fp8_sm90_kernel<Tile, Epilogue>, params, Tile::kCluster,
                           Kernel::kThreads, Kernel::kSharedBytes, most_items, stream);
}

template <class Tile, class Out>
Status launch_grouped_gemm_fp8_tile(const GroupedGemmArgs& args, Stream stream) {
  using Epilogue = StoreFp8Epilogue<Out>;
  using Kernel = GroupedGemmFp8Sm90<Tile, Epilogue>;
  typename Kernel::Params params = {};
  Fp8Operands operands;
  operands.lhs = dense_stack(args.lhs.data, DType::kF8E4M3, 1, args.lhs.dims[0], args.lhs.dims[1]);
  operands.lhs_scale = args.lhs_scale.as<float>();
  operands.rhs[0] = args.rhs;
  operands.rhs_scale[0] = args.rhs_scale.as<float>();
  DROPLESS_RETURN_IF_ERROR(set_fp8_operands<Kernel>(operands, args.offsets, &params));
  DROPLESS_RETURN_IF_ERROR(
      make_result(dense_stack(args.out.data, args.out.dtype, 1, args.out.dims[0], args.out.dims[1]),
                  "out", &params.epilogue.out));
  params.epilogue.bias = args.bias.as<float>();
  return launch_fp8_product<Tile, Epilogue>(params, stream);
}

}  // namespace dropless::cuda
