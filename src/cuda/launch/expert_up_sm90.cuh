// Shared by the instantiation files of expert_up_sm90.
#pragma once

#include "cuda/kernels/epilogue_swiglu.cuh"
#include "cuda/kernels/grouped_gemm_sm90.cuh"
#include "cuda/launch/experts_sm90.h"
#include "cuda/launch/launch_sm90.cuh"

namespace dropless::cuda {

template <class Tile, Major kMajor, GluForm kForm>
Status launch_expert_up_tile(const ExpertUpArgs& args, Stream stream) {
  using Epilogue = SwigluEpilogue<kForm>;
  using Kernel = GroupedGemmSm90<Tile, kMajor, Epilogue, Gathered::kLhs>;
  const int64_t m = args.a.dims[0], width = args.a.dims[1], experts = args.gate.dims[0];
  const int64_t model = args.x.dims[1];
  typename Kernel::Params params = {};
  Status status =
      make_row_source(args.x, model, args.slot_of_row, args.experts_per_token, "x", &params.source);
  const ConstTensor* matrices[2] = {&args.gate, &args.up};
  constexpr int kParts = Epilogue::kMatrices;
  for (int i = 0; i < kParts && status.ok(); ++i) {
    status = encode_tensor_map(dense_stack(matrices[i]->data, DType::kBF16, experts,
                                           matrices[i]->dims[1], matrices[i]->dims[2]),
                               kChunk, i == 0 ? "gate" : "up", &params.rhs[i]);
  }
  if (status.ok()) {
    status =
        make_result(dense_stack(args.a.data, DType::kBF16, 1, m, width), "a", &params.epilogue.a);
  }
  if (status.ok() && args.h.given()) {
    const MatrixStack h = {args.h.data, DType::kBF16,       width,    m,
                           kParts,      kParts * 2 * width, 2 * width};
    status = make_result(h, "h", &params.epilogue.h);
  }
  if (!status.ok()) return status;
  params.epilogue.gate_bias = args.gate_bias.as<float>();
  params.epilogue.up_bias = args.up_bias.as<float>();
  params.epilogue.activation = args.activation;
  params.offsets = args.offsets.as<int32_t>();
  params.experts = static_cast<int>(experts);
  params.rows = static_cast<int>(m);
  params.cols = static_cast<int>(width);
  params.blocks = static_cast<int>(ceil_div(model, kChunk));
  params.planes = 1;
  const int64_t most_items =
      (ceil_div(m, Tile::kRows) + std::min(experts, m)) * ceil_div(width, Kernel::kTileCols);
  return launch_persistent(&grouped_gemm_sm90_kernel<Tile, kMajor, Epilogue, Gathered::kLhs>,
                           params, Tile::kCluster, kGemmThreads, Kernel::kSharedBytes, most_items,
                           stream);
}

// Every activation of one orientation of the weights.
template <Major kMajor>
Status launch_expert_up_major(const ExpertUpArgs& args, Stream stream) {
  using Tile = ExpertUpSm90Tile;
  switch (glu_form(args.activation)) {
    case GluForm::kSilu:
      return launch_expert_up_tile<Tile, kMajor, GluForm::kSilu>(args, stream);
    case GluForm::kSiluLimited:
      return launch_expert_up_tile<Tile, kMajor, GluForm::kSiluLimited>(args, stream);
    case GluForm::kGated:
      return launch_expert_up_tile<Tile, kMajor, GluForm::kGated>(args, stream);
    case GluForm::kUngated:
      break;
  }
  return launch_expert_up_tile<Tile, kMajor, GluForm::kUngated>(args, stream);
}

extern template Status launch_expert_up_major<Major::kMn>(const ExpertUpArgs&, Stream);
extern template Status launch_expert_up_major<Major::kK>(const ExpertUpArgs&, Stream);

}  // namespace dropless::cuda
