// Shared by grouped_wgrad_sm80.cu and grouped_wgrad_f32.cu.
#pragma once

#include "cuda/kernels/grouped_wgrad_sm80.cuh"
#include "cuda/launch/launch_sm80.cuh"

namespace dropless::cuda {

template <class T>
Status launch_grouped_wgrad_block(const GroupedWgradArgs& args, Stream stream) {
  using Math = BlockMath<T, Major::kMn, Major::kMn>;
  WgradParams params = {};
  const int64_t planes = args.dy.dims[1], cols = args.dy.dims[2];
  params.x = args.x.as<uint8_t>();
  params.dy = args.dy.as<uint8_t>();
  for (int64_t p = 0; p < planes; ++p) {
    const Tensor& dw = args.dw[p];
    const int64_t row_bytes = cols * size_of(dw.dtype);
    params.dw[p] = {dw.as<uint8_t>(), row_bytes, dw.dims[1] * row_bytes};
  }
  params.offsets = args.offsets.as<int32_t>();
  if (args.gather == Gather::kLhs) {
    params.x_map = map_of(args.slot_of_row, args.experts_per_token, args.x.dims[0]);
  } else if (args.gather == Gather::kRhs) {
    params.dy_map = map_of(args.slot_of_row, args.experts_per_token, args.dy.dims[0]);
  }
  params.x_row_bytes = static_cast<uint32_t>(args.x.dims[1] * sizeof(T));
  params.dy_plane_bytes = cols * static_cast<int64_t>(sizeof(T));
  params.dy_row_bytes = static_cast<uint32_t>(planes * params.dy_plane_bytes);
  params.experts = static_cast<int>(args.dw[0].dims[0]);
  params.contraction = static_cast<int>((args.gather == Gather::kLhs ? args.dy : args.x).dims[0]);
  params.rows = static_cast<int>(args.x.dims[1]);
  params.cols = static_cast<int>(cols);
  params.planes = static_cast<int>(planes);
  params.access = common_alignment({args.x, args.dy});
  params.vector = common_alignment({args.dw[0], args.dw[1]}) == 16;
  params.out_f32 = args.dw[0].dtype == DType::kF32;
  params.accumulate = args.accumulate;
  const int64_t items =
      params.experts * ceil_div(params.rows, Math::kRows) * planes * ceil_div(cols, Math::kCols);
  auto* kernel = &grouped_wgrad_sm80_kernel<Math, false>;
  if constexpr (kHasAligned<T>) {
    if (params.access == 16 && params.vector) kernel = &grouped_wgrad_sm80_kernel<Math, true>;
  }
  return launch_blocks<Math>("grouped_wgrad", kernel, params, items, stream);
}

}  // namespace dropless::cuda
