#include "cuda/launch/experts_fp8_sm90.h"
#include "cuda/launch/grouped_gemm_fp8_sm90.cuh"

namespace dropless::cuda {
namespace {

// dx_rows = dh_gate * gate^T + dh_up * up^T: one product whose contraction runs over both planes of
// dh.
template <class Tile>
Status launch_tile(const ExpertUpBackwardArgs& args, Stream stream) {
  using Epilogue = StoreFp8Epilogue<__nv_bfloat16>;
  const int64_t rows = args.dh.dims[0], width = args.dh.dims[2];
  using Kernel = GroupedGemmFp8Sm90<Tile, Epilogue>;
  typename Kernel::Params params = {};
  Fp8Operands operands;
  operands.lhs = {args.dh.data, DType::kF8E4M3, width, rows, 2, 2 * width, width};
  operands.lhs_name = "dh";
  operands.lhs_scale = args.dh_scale.as<float>();
  operands.rhs[0] = args.gate;
  operands.rhs[1] = args.up;
  operands.rhs_name[0] = "gate";
  operands.rhs_name[1] = "up";
  operands.rhs_scale[0] = args.gate_scale.as<float>();
  operands.rhs_scale[1] = args.up_scale.as<float>();
  DROPLESS_RETURN_IF_ERROR(set_fp8_operands<Kernel>(operands, args.offsets, &params));
  DROPLESS_RETURN_IF_ERROR(
      make_result(dense_stack(args.dx_rows.data, DType::kBF16, 1, rows, args.dx_rows.dims[1]),
                  "dx_rows", &params.epilogue.out));
  return launch_fp8_product<Tile, Epilogue>(params, stream);
}

}  // namespace

Status launch_expert_up_backward_fp8_sm90(const ExpertUpBackwardArgs& args, int tile,
                                          Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const ExpertUpBackwardArgs&, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_tile<std::tuple_element_t<kIndex, GroupedGemmFp8Sm90Tiles>>...};
    return kLaunches[tile](args, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<GroupedGemmFp8Sm90Tiles>>());
}

}  // namespace dropless::cuda
