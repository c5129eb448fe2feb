// Shared by the instantiation files of expert_down_backward_sm90.
#pragma once

#include "cuda/kernels/epilogue_dswiglu.cuh"
#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {

// dA' = dy * down^T: down [E, I, H] is K-major as it lies.
template <class Tile, ActivationKind kActivation>
Status launch_expert_down_backward_tile(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                        float* row_sums, Stream stream) {
  using Epilogue = DswigluEpilogue<kActivation>;
  using Kernel = GroupedGemmSm90<Tile, Major::kK, Epilogue>;
  const int64_t m = rows.dims[0], model = rows.dims[1];
  const int64_t experts = args.down.dims[0], width = args.down.dims[1];
  typename Kernel::Params params = {};
  Status status = encode_tensor_map(dense_stack(rows.data, DType::kBF16, 1, m, model), kChunk, "dy", &params.lhs);
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
    status = make_rows(dense_stack(args.pa.data, DType::kBF16, 1, m, width), "pa", &params.epilogue.pa);
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
  return launch_persistent(&grouped_gemm_sm90_kernel<Tile, Major::kK, Epilogue>, params,
                           Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, most_items, stream);
}

// All compiled tiles of one activation.
template <ActivationKind kActivation>
Status launch_expert_down_backward_all(const ExpertDownBackwardArgs& args, ConstTensor rows,
                                       float* row_sums, int tile, Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const ExpertDownBackwardArgs&, ConstTensor, float*, Stream);
    static constexpr Launch kLaunches[] = {&launch_expert_down_backward_tile<
        std::tuple_element_t<kIndex, ExpertDownBackwardSm90Tiles>, kActivation>...};
    return kLaunches[tile](args, rows, row_sums, stream);
  }(std::make_index_sequence<std::tuple_size_v<ExpertDownBackwardSm90Tiles>>());
}

}  // namespace dropless::cuda
