// Workspace sizes of the CUDA backend. Host code without CUDA, since a program compiled for a CPU
// must have buffers of the same shapes.
#include "core/product_workspace.h"
#include "core/routing_chunks.h"
#include "core/token_blocks.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

int64_t route_workspace_bytes(const RouteArgs& args) {
  return routing_workspace(args.logits.dims[0], args.logits.dims[1]).route_bytes;
}

int64_t plan_workspace_bytes(const PlanArgs& args) {
  return routing_workspace(args.ids.dims[0], args.plan.counts.dims[0]).plan_bytes;
}

namespace {

// Arrays of a workspace start at multiples of 256 bytes.
int64_t aligned(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

// Float8 operands' rows in the rows' order, and their scales. The kernels of other operands gather
// rows while they load them.
int64_t copied_rows_bytes(int64_t rows, const ConstTensor& x) {
  if (x.dtype != DType::kF8E4M3) return 0;
  return aligned(rows * x.dims[1]) + aligned(rows * ceil_div(x.dims[1], kScaleBlock) * 4);
}

}  // namespace

int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs&) { return 0; }

// A copy of the gathered operand in row order; in FP8, codes and scales of both.
int64_t grouped_wgrad_workspace_bytes(const GroupedWgradArgs& args) {
  if (args.fp8) {
    const int64_t m = args.gather == Gather::kNone ? args.x.dims[0] : args.slot_of_row.dims[0];
    const int64_t experts = args.dw[0].dims[0];
    const auto bytes = [&](const ConstTensor& scale, int64_t planes, int64_t width) {
      if (scale.given()) return int64_t{0};  // quantised already
      const BlockedOperand operand(m, experts, planes, width);
      return aligned(operand.code_bytes()) + aligned(operand.scale_bytes());
    };
    return bytes(args.x_scale, 1, args.dw[0].dims[1]) +
           bytes(args.dy_scale, args.dy.dims[1], args.dw[0].dims[2]);
  }
  const int64_t rows = args.slot_of_row.dims[0], size = size_of(args.x.dtype);
  if (args.gather == Gather::kLhs) return aligned(rows * args.x.dims[1] * size);
  if (args.gather == Gather::kRhs) return aligned(rows * args.dy.dims[1] * args.dy.dims[2] * size);
  return 0;
}

int64_t expert_up_workspace_bytes(const ExpertUpArgs& args) {
  return copied_rows_bytes(args.a.dims[0], args.x);
}

// A partial sum for each row and tile of columns, after the copied rows.
int64_t expert_down_backward_workspace_bytes(const ExpertDownBackwardArgs& args) {
  const int64_t rows = args.h.dims[0];
  return copied_rows_bytes(rows, args.dy) +
         aligned(ceil_div(args.h.dims[2], kDownBackwardTileCols) * rows * 4);
}

int64_t expert_up_backward_workspace_bytes(const ExpertUpBackwardArgs&) { return 0; }

}  // namespace dropless::cuda
