#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/grouped_gemm_sm90.cuh"

namespace dropless::cuda {
namespace {

// dx_rows = dh_gate * gate^T + dh_up * up^T: one product whose contraction runs over both planes of
// dh. Experts without a gate have one.
template <class Tile>
Status launch_tile(const ExpertUpBackwardArgs& args, Stream stream) {
  using Kernel = GroupedGemmSm90<Tile, Major::kK, StoreEpilogue<__nv_bfloat16>>;
  const int64_t rows = args.dh.dims[0], width = args.dh.dims[2];
  const int64_t experts = args.gate.dims[0], cols = args.gate.dims[1];
  typename Kernel::Params params = {};
  const int parts = static_cast<int>(args.dh.dims[1]);
  const MatrixStack dh = {args.dh.data, DType::kBF16,      width,    rows,
                          parts,        parts * 2 * width, 2 * width};
  Status status = encode_tensor_map(dh, kChunk, "dh", &params.lhs);
  const ConstTensor* matrices[2] = {&args.gate, &args.up};
  for (int i = 0; i < parts && status.ok(); ++i) {
    status = encode_tensor_map(dense_stack(matrices[i]->data, DType::kBF16, experts, cols, width),
                               kChunk, i == 0 ? "gate" : "up", &params.rhs[i]);
  }
  if (parts == 1) params.rhs[1] = params.rhs[0];  // prefetched all the same
  if (status.ok()) {
    status = make_result(dense_stack(args.dx_rows.data, DType::kBF16, 1, rows, cols), "dx_rows",
                         &params.epilogue.out);
  }
  if (!status.ok()) return status;
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.rows = static_cast<int>(rows);
  params.cols = static_cast<int>(cols);
  params.blocks = static_cast<int>(ceil_div(width, kChunk));
  params.planes = parts;
  const int64_t most_items =
      (ceil_div(rows, Tile::kRows) + std::min(experts, rows)) * ceil_div(cols, Tile::kCols);
  return launch_persistent(&grouped_gemm_sm90_kernel<Tile, Major::kK, StoreEpilogue<__nv_bfloat16>>,
                           params, Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, most_items,
                           stream);
}

}  // namespace

Status launch_expert_up_backward_sm90(const ExpertUpBackwardArgs& args, int tile, Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const ExpertUpBackwardArgs&, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_tile<std::tuple_element_t<kIndex, GroupedGemmSm90Tiles>>...};
    return kLaunches[tile](args, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<GroupedGemmSm90Tiles>>());
}

}  // namespace dropless::cuda
