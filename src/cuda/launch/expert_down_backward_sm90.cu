#include "cuda/kernels/epilogue_dswiglu.cuh"
#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/launch_sm90.cuh"
#include "cuda/launch/weight_gradient.h"

namespace dropless::cuda {
namespace {

// dA' = dy * down^T: down [E, I, H] is K-major as it lies.
template <class Tile, GluForm kForm>
Status launch_tile(const ExpertDownBackwardArgs& args, float* row_sums, Stream stream) {
  using Epilogue = DswigluEpilogue<kForm>;
  using Kernel = GroupedGemmSm90<Tile, Major::kK, Epilogue, Gathered::kLhs>;
  const int64_t m = args.h.dims[0], model = args.dy.dims[1];
  const int64_t experts = args.down.dims[0], width = args.down.dims[1];
  typename Kernel::Params params = {};
  Status status =
      make_row_source(args.dy, model, args.slot_of_row, args.weights.dims[1], "dy", &params.source);
  if (status.ok()) {
    status = encode_tensor_map(dense_stack(args.down.data, DType::kBF16, experts, width, model),
                               Kernel::kRhsRows, "down", &params.rhs[0]);
  }
  params.rhs[1] = params.rhs[0];
  constexpr int kParts = Glu<kForm>::kParts;
  const MatrixStack h = {args.h.data, DType::kBF16,       width,    m,
                         kParts,      kParts * 2 * width, 2 * width};
  MatrixStack dh = h;
  dh.data = args.dh.data;
  constexpr int kBox = DswigluStaging::BoxType::kRowBytes;
  if (status.ok()) status = encode_tensor_map(h, kChunk, "h", &params.epilogue.h, kBox);
  if (status.ok()) status = make_result(dh, "dh", &params.epilogue.dh, kBox);
  if (status.ok()) {
    status = make_result(dense_stack(args.pa.data, DType::kBF16, 1, m, width), "pa",
                         &params.epilogue.pa, kBox);
  }
  if (!status.ok()) return status;
  params.epilogue.row_sums = row_sums;
  params.epilogue.weights = args.weights.as<float>();
  params.epilogue.slot_of_row = args.slot_of_row.as<int32_t>();
  params.epilogue.rows = static_cast<int>(m);
  params.epilogue.activation = args.activation;
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.rows = static_cast<int>(m);
  params.cols = static_cast<int>(width);
  params.blocks = static_cast<int>(ceil_div(model, kChunk));
  params.planes = 1;
  const int64_t most_items =
      (ceil_div(m, Tile::kRows) + std::min(experts, m)) * ceil_div(width, Tile::kCols);
  return launch_persistent(&grouped_gemm_sm90_kernel<Tile, Major::kK, Epilogue, Gathered::kLhs>,
                           params, Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, most_items,
                           stream);
}

template <GluForm kForm>
Status launch_product(const ExpertDownBackwardArgs& args, int tile, float* row_sums,
                      Stream stream) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Launch = Status (*)(const ExpertDownBackwardArgs&, float*, Stream);
    static constexpr Launch kLaunches[] = {
        &launch_tile<std::tuple_element_t<kIndex, ExpertDownBackwardSm90Tiles>, kForm>...};
    return kLaunches[tile](args, row_sums, stream);
  }
  (std::make_index_sequence<std::tuple_size_v<ExpertDownBackwardSm90Tiles>>());
}

}  // namespace

Status launch_expert_down_backward_sm90(const ExpertDownBackwardArgs& args, int tile,
                                        float* row_sums, Stream stream) {
  Status status;
  switch (glu_form(args.activation)) {
    case GluForm::kSilu:
      status = launch_product<GluForm::kSilu>(args, tile, row_sums, stream);
      break;
    case GluForm::kSiluLimited:
      status = launch_product<GluForm::kSiluLimited>(args, tile, row_sums, stream);
      break;
    case GluForm::kGated:
      status = launch_product<GluForm::kGated>(args, tile, row_sums, stream);
      break;
    case GluForm::kUngated:
      status = launch_product<GluForm::kUngated>(args, tile, row_sums, stream);
      break;
  }
  if (!status.ok()) return status;
  const int tiles =
      static_cast<int>(ceil_div(args.down.dims[1], expert_down_backward_sm90_cols(tile)));
  const RowMap map = {args.slot_of_row.as<int32_t>(), Divisor::of(args.weights.dims[1]),
                      static_cast<int>(args.dy.dims[0])};
  return launch_weight_gradient(args, args.dy, map, row_sums, tiles, stream);
}

}  // namespace dropless::cuda
