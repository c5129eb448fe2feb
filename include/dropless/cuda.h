// The CUDA backend: the operations of the other headers on a stream.
//
// Every function obeys one contract: pointers are device memory, `workspace` is a uint8 tensor [n]
// with at least <op>_workspace_bytes(args) bytes at a 256-byte boundary, nothing is allocated,
// nothing waits for the device, no device data is read by the host, and grids depend on shapes and
// the device alone. So each call can be captured into a CUDA graph. Workspace sizes depend on
// shapes alone.
#pragma once

#include "dropless/combine.h"
#include "dropless/experts.h"
#include "dropless/grouped_gemm.h"
#include "dropless/quantize.h"
#include "dropless/route.h"
#include "dropless/status.h"
#include "dropless/types.h"

struct CUstream_st;

namespace dropless::cuda {

using Stream = CUstream_st*;  // a cudaStream_t, without the CUDA headers

// Routing. At most this many experts, and choices of one token.
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxExpertsPerToken = 32;
int64_t route_workspace_bytes(const RouteArgs& args);
int64_t plan_workspace_bytes(const PlanArgs& args);
Status route(const RouteArgs& args, Tensor workspace, Stream stream);
Status plan(const PlanArgs& args, Tensor workspace, Stream stream);

// These need no workspace, and read none that is given.
Status route_backward(const RouteBackwardArgs& args, Tensor workspace, Stream stream);
Status permute(const PermuteArgs& args, Tensor workspace, Stream stream);
Status combine(const CombineArgs& args, Tensor workspace, Stream stream);
Status combine_backward(const CombineBackwardArgs& args, Tensor workspace, Stream stream);
Status group_sum(const GroupSumArgs& args, Tensor workspace, Stream stream);
Status quantize_rows(const QuantizeRowsArgs& args, Tensor workspace, Stream stream);
Status quantize_weight(const QuantizeWeightArgs& args, Tensor workspace, Stream stream);

// Products over the experts' rows.
int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args);
int64_t grouped_wgrad_workspace_bytes(const GroupedWgradArgs& args);
int64_t expert_up_workspace_bytes(const ExpertUpArgs& args);
int64_t expert_down_backward_workspace_bytes(const ExpertDownBackwardArgs& args);
int64_t expert_up_backward_workspace_bytes(const ExpertUpBackwardArgs& args);
Status grouped_gemm(const GroupedGemmArgs& args, Tensor workspace, Stream stream);
Status grouped_wgrad(const GroupedWgradArgs& args, Tensor workspace, Stream stream);
Status expert_up(const ExpertUpArgs& args, Tensor workspace, Stream stream);
Status expert_down_backward(const ExpertDownBackwardArgs& args, Tensor workspace, Stream stream);
Status expert_up_backward(const ExpertUpBackwardArgs& args, Tensor workspace, Stream stream);

}  // namespace dropless::cuda
