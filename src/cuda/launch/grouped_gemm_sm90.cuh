// Shared by the instantiation files of grouped_gemm_sm90.
#pragma once

#include "cuda/kernels/epilogue_store.cuh"
#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/launch/grouped_gemm_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {

template <class Tile, Major kRhsMajor, class Out>
Status launch_grouped_gemm_tile(const GroupedGemmArgs& args, Stream stream) {
  using Kernel = GroupedGemmSm90<Tile, kRhsMajor, StoreEpilogue<Out>>;
  const int64_t rows = args.lhs.dims[0], contraction = args.lhs.dims[1], cols = args.out.dims[1];
  const int64_t experts = args.rhs.dims[0];
  typename Kernel::Params params = {};
  Status status = encode_tensor_map(dense_stack(args.lhs.data, DType::kBF16, 1, rows, contraction),
                                    kChunk, "lhs", &params.lhs);
  if (!status.ok()) return status;
  status = encode_tensor_map(
      dense_stack(args.rhs.data, DType::kBF16, experts, args.rhs.dims[1], args.rhs.dims[2]), kChunk,
      "rhs", &params.rhs[0]);
  if (!status.ok()) return status;
  params.rhs[1] = params.rhs[0];
  status = make_result(dense_stack(args.out.data, args.out.dtype, 1, rows, cols), "out",
                       &params.epilogue.out);
  if (!status.ok()) return status;
  params.epilogue.bias = args.bias.as<float>();
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.rows = static_cast<int>(rows);
  params.cols = static_cast<int>(cols);
  params.blocks = static_cast<int>(ceil_div(contraction, kChunk));
  params.planes = 1;
  const int64_t most_items =
      (ceil_div(rows, Tile::kRows) + std::min(experts, rows)) * ceil_div(cols, Tile::kCols);
  return launch_persistent(&grouped_gemm_sm90_kernel<Tile, kRhsMajor, StoreEpilogue<Out>>, params,
                           Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, most_items, stream);
}

// All compiled tiles of one orientation of rhs and one output type.
template <Major kRhsMajor, class Out>
Status launch_grouped_gemm_all(const GroupedGemmArgs& args, int tile, Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const GroupedGemmArgs&, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_grouped_gemm_tile<std::tuple_element_t<kIndex, GroupedGemmSm90Tiles>, kRhsMajor,
                                  Out>...};
    return kLaunches[tile](args, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<GroupedGemmSm90Tiles>>());
}

extern template Status launch_grouped_gemm_all<Major::kMn, __nv_bfloat16>(const GroupedGemmArgs&,
                                                                          int, Stream);
extern template Status launch_grouped_gemm_all<Major::kK, __nv_bfloat16>(const GroupedGemmArgs&,
                                                                         int, Stream);
extern template Status launch_grouped_gemm_all<Major::kMn, float>(const GroupedGemmArgs&, int,
                                                                  Stream);
extern template Status launch_grouped_gemm_all<Major::kK, float>(const GroupedGemmArgs&, int,
                                                                 Stream);

}  // namespace dropless::cuda
