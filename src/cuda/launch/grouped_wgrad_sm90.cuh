// Shared by the instantiation files of grouped_wgrad_sm90.
#pragma once

#include "cuda/kernels/grouped_wgrad_sm90.cuh"
#include "cuda/launch/grouped_wgrad_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {

template <class Tile, class Out, bool kAccumulate, Gathered kGathered>
Status launch_grouped_wgrad_tile(const GroupedWgradArgs& args, Stream stream) {
  using Kernel = GroupedWgradSm90<Tile, Out, kAccumulate, kGathered>;
  const int64_t depth = (kGathered == Gathered::kLhs ? args.dy : args.x).dims[0];
  const int64_t rows = args.x.dims[1];
  const int64_t planes = args.dy.dims[1], cols = args.dy.dims[2];
  const int64_t experts = args.dw[0].dims[0];
  GroupedWgradParams params = {};
  Status status;
  if (kGathered == Gathered::kLhs) {
    status = make_row_source(args.x, rows, args.slot_of_row, args.experts_per_token, "x",
                             &params.source);
  } else {
    status = encode_tensor_map(dense_stack(args.x.data, DType::kBF16, 1, depth, rows), kChunk, "x",
                               &params.x);
  }
  if (!status.ok()) return status;
  const MatrixStack dy = {args.dy.data, DType::kBF16,      cols,    args.dy.dims[0],
                          planes,       planes * cols * 2, cols * 2};
  if (kGathered == Gathered::kRhs) {
    status = check_tma(dy, "dy");
    if (status.ok()) {
      status = make_row_source(args.dy, planes * cols, args.slot_of_row, args.experts_per_token,
                               "dy", &params.source);
    }
  } else {
    status = encode_tensor_map(dy, kChunk, "dy", &params.dy);
  }
  for (int plane = 0; plane < planes && status.ok(); ++plane) {
    status =
        make_result(dense_stack(args.dw[plane].data, args.dw[plane].dtype, experts, rows, cols),
                    "dw", &params.dw[plane]);
  }
  if (!status.ok()) return status;
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.contraction = static_cast<int>(depth);
  params.rows = static_cast<int>(rows);
  params.cols = static_cast<int>(cols);
  params.planes = static_cast<int>(planes);
  const int64_t items =
      experts * item_count(static_cast<int>(ceil_div(rows, Tile::kRows)),
                           static_cast<int>(planes * ceil_div(cols, Tile::kCols)), Tile::kCluster);
  return launch_persistent(&grouped_wgrad_sm90_kernel<Tile, Out, kAccumulate, kGathered>, params,
                           Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, items, stream);
}

// All compiled tiles of one output type.
template <class Out, bool kAccumulate>
Status launch_grouped_wgrad_all(const GroupedWgradArgs& args, int tile, Stream stream) {
  if (args.gather == Gather::kLhs) {
    return launch_grouped_wgrad_tile<GatheringWgradSm90Tile, Out, kAccumulate, Gathered::kLhs>(
        args, stream);
  }
  if (args.gather == Gather::kRhs) {
    return launch_grouped_wgrad_tile<GatheringWgradSm90Tile, Out, kAccumulate, Gathered::kRhs>(
        args, stream);
  }
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const GroupedWgradArgs&, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_grouped_wgrad_tile<std::tuple_element_t<kIndex, GroupedWgradSm90Tiles>, Out,
                                   kAccumulate, Gathered::kNone>...};
    return kLaunches[tile](args, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<GroupedWgradSm90Tiles>>());
}

extern template Status launch_grouped_wgrad_all<__nv_bfloat16, false>(const GroupedWgradArgs&, int,
                                                                      Stream);
extern template Status launch_grouped_wgrad_all<__nv_bfloat16, true>(const GroupedWgradArgs&, int,
                                                                     Stream);
extern template Status launch_grouped_wgrad_all<float, false>(const GroupedWgradArgs&, int, Stream);
extern template Status launch_grouped_wgrad_all<float, true>(const GroupedWgradArgs&, int, Stream);

}  // namespace dropless::cuda
