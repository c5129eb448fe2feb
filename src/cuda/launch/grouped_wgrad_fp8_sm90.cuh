// Shared by the instantiation files of grouped_wgrad_fp8_sm90.
#pragma once

#include <tuple>
#include <utility>

#include "cuda/kernels/grouped_wgrad_fp8_sm90.cuh"
#include "cuda/launch/grouped_wgrad_fp8_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {

template <class Tile, class Out, bool kAccumulate>
Status launch_grouped_wgrad_fp8_tile(const GroupedWgradArgs& args, int64_t depth,
                                     const WgradFp8Scratch& scratch, Stream stream) {
  using Kernel = GroupedWgradFp8Sm90<Tile, Out, kAccumulate>;
  const int64_t experts = args.dw[0].dims[0];
  const int64_t rows = args.dw[0].dims[1], cols = args.dw[0].dims[2], planes = args.dy.dims[1];
  GroupedWgradFp8Params params = {};
  params.x = scratch.x;
  params.x_scale = scratch.x_scale;
  params.dy = scratch.dy;
  params.dy_scale = scratch.dy_scale;
  for (int plane = 0; plane < planes; ++plane) {
    const MatrixStack dw =
        dense_stack(args.dw[plane].data, args.dw[plane].dtype, experts, rows, cols);
    params.plain |= !check_tma(dw, "dw").ok();
    if (params.plain) {
      set_result(dw, &params.dw[plane]);
    } else {
      DROPLESS_RETURN_IF_ERROR(make_result(dw, "dw", &params.dw[plane]));
    }
  }
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.contraction = static_cast<int>(depth);
  params.rows = static_cast<int>(rows);
  params.cols = static_cast<int>(cols);
  params.planes = static_cast<int>(planes);
  params.x_columns = static_cast<int>(BlockedOperand(depth, experts, 1, rows).columns);
  params.dy_columns = static_cast<int>(BlockedOperand(depth, experts, planes, cols).columns);
  const int64_t items =
      experts * ceil_div(rows, Tile::kRows) * planes * ceil_div(cols, Tile::kCols);
  return launch_persistent(&grouped_wgrad_fp8_sm90_kernel<Tile, Out, kAccumulate>, params,
                           Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, items, stream);
}

// All compiled tiles of one output type.
template <class Out, bool kAccumulate>
Status launch_grouped_wgrad_fp8_all(const GroupedWgradArgs& args, int64_t depth,
                                    const WgradFp8Scratch& scratch, int tile, Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const GroupedWgradArgs&, int64_t, const WgradFp8Scratch&, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_grouped_wgrad_fp8_tile<std::tuple_element_t<kIndex, GroupedWgradFp8Sm90Tiles>, Out,
                                       kAccumulate>...};
    return kLaunches[tile](args, depth, scratch, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<GroupedWgradFp8Sm90Tiles>>());
}

}  // namespace dropless::cuda
