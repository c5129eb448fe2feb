// Shared by expert_down_backward_sm80.cu and expert_down_backward_f32.cu.
#pragma once

#include "core/product_workspace.h"
#include "cuda/launch/launch_sm80.cuh"
#include "cuda/launch/weight_gradient.h"

namespace dropless::cuda {

// dA' = dy * down^T: down [E, I, H] is K-major as it lies.
template <class T>
Status launch_expert_down_backward_block(const ExpertDownBackwardArgs& args, float* row_sums,
                                         Stream stream) {
  using Math = BlockMath<T, Major::kK, Major::kK>;
  static_assert(Math::kCols >= kDownBackwardTileCols, "a row sum a tile");
  const int64_t rows = args.h.dims[0], width = args.h.dims[2];
  const RowMap map = map_of(args.slot_of_row, args.weights.dims[1], args.dy.dims[0]);
  if (width > 0) {
    using Epilogue = DswigluRows<T>;
    RowProductParams<typename Epilogue::Params> params = {};
    set_shapes(params, args.dy, args.down, args.down, args.offsets, rows, width);
    params.map = map;
    Tensor h;  // as a tensor that could be written, which it is not
    h.data = const_cast<void*>(args.h.data);
    h.dtype = args.h.dtype;
    h.rank = args.h.rank;
    std::copy_n(args.h.dims, kMaxRank, h.dims);
    params.epilogue.h = row_array(h);
    params.epilogue.dh = row_array(args.dh);
    params.epilogue.pa = row_array(args.pa);
    params.epilogue.row_sums = row_sums;
    params.epilogue.weights = args.weights.as<float>();
    params.epilogue.slot_of_row = args.slot_of_row.as<int32_t>();
    params.epilogue.slots = static_cast<int>(args.weights.size());
    params.epilogue.rows = params.rows;
    params.epilogue.cols = params.cols;
    params.epilogue.activation = args.activation;
    params.epilogue.vector = common_alignment({args.h, args.dh, args.pa}) == 16;
    const Status status =
        launch_row_product<Math, Epilogue>("expert_down_backward", params, stream);
    if (!status.ok()) return status;
  }
  return launch_weight_gradient(args, args.dy, map, row_sums,
                                static_cast<int>(ceil_div(width, Math::kCols)), stream);
}

}  // namespace dropless::cuda
