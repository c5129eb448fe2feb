// Workspace sizes of the CUDA backend. Host code without CUDA, since a program compiled for a CPU
// must have buffers of the same shapes.
#include "core/routing_chunks.h"
#include "dropless/cuda.h"

namespace dropless::cuda {

int64_t route_workspace_bytes(const RouteArgs& args) {
  return routing_workspace(args.logits.dims[0], args.logits.dims[1]).route_bytes;
}

int64_t plan_workspace_bytes(const PlanArgs& args) {
  return routing_workspace(args.ids.dims[0], args.plan.counts.dims[0]).plan_bytes;
}

}  // namespace dropless::cuda
