#include "cuda/kernels/epilogue_swiglu_fp8.cuh"
#include "cuda/launch/experts_fp8_sm90.h"
#include "cuda/launch/grouped_gemm_fp8_sm90.cuh"

namespace dropless::cuda {
namespace {

// 128 columns each of gate and up: the narrowest that holds a whole block of A's scales.
using Tile = Fp8Tile<256, 3, 1, 128>;

template <ActivationKind kActivation, bool kFp8H>
Status launch(const ExpertUpArgs& args, ConstTensor rows, ConstTensor row_scale, Stream stream) {
  using Epilogue = SwigluFp8Epilogue<kActivation, kFp8H>;
  const int64_t m = args.a.dims[0], width = args.a.dims[1];
  using Kernel = GroupedGemmFp8Sm90<Tile, Epilogue>;
  typename Kernel::Params params = {};
  Fp8Operands operands;
  operands.lhs = dense_stack(rows.data, DType::kF8E4M3, 1, m, rows.dims[1]);
  operands.lhs_name = "x";
  operands.lhs_scale = row_scale.as<float>();
  operands.rhs[0] = args.gate;
  operands.rhs[1] = args.up;
  operands.rhs_name[0] = "gate";
  operands.rhs_name[1] = "up";
  operands.rhs_scale[0] = args.gate_scale.as<float>();
  operands.rhs_scale[1] = args.up_scale.as<float>();
  DROPLESS_RETURN_IF_ERROR(set_fp8_operands<Kernel>(operands, args.offsets, &params));
  auto& epilogue = params.epilogue;
  DROPLESS_RETURN_IF_ERROR(
      make_result(dense_stack(args.a.data, DType::kF8E4M3, 1, m, width), "a", &epilogue.a));
  if (args.h.given()) {
    const int64_t row_bytes = width * size_of(args.h.dtype);
    const MatrixStack h = {args.h.data, args.h.dtype, width, m, 2, 2 * row_bytes, row_bytes};
    DROPLESS_RETURN_IF_ERROR(make_result(h, "h", &epilogue.h));
    epilogue.h_scale = args.h_scale.as<float>();
  }
  epilogue.a_scale = args.a_scale.as<float>();
  epilogue.gate_bias = args.gate_bias.as<float>();
  epilogue.up_bias = args.up_bias.as<float>();
  epilogue.blocks = static_cast<int>(ceil_div(width, kScaleBlock));
  epilogue.rounding = args.scale_rounding;
  return launch_fp8_product<Tile, Epilogue>(params, stream);
}

template <bool kFp8H>
Status launch_activation(const ExpertUpArgs& args, ConstTensor rows, ConstTensor row_scale,
                         Stream stream) {
  switch (args.activation.kind) {
    case ActivationKind::kGelu:
      return launch<ActivationKind::kGelu, kFp8H>(args, rows, row_scale, stream);
    case ActivationKind::kGeluTanh:
      return launch<ActivationKind::kGeluTanh, kFp8H>(args, rows, row_scale, stream);
    default:  // fp8_has_activation: no other comes here
      break;
  }
  return launch<ActivationKind::kSilu, kFp8H>(args, rows, row_scale, stream);
}

}  // namespace

Status launch_expert_up_fp8_sm90(const ExpertUpArgs& args, ConstTensor rows, ConstTensor row_scale,
                                 Stream stream) {
  return args.h.dtype == DType::kF8E4M3 ? launch_activation<true>(args, rows, row_scale, stream)
                                        : launch_activation<false>(args, rows, row_scale, stream);
}

}  // namespace dropless::cuda
