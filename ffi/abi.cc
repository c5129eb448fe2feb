// The C ABI that both shared libraries export beside their handlers; compiled into each of them.

#include <cstdint>

#include "core/routing_chunks.h"
#include "dropless/cuda.h"
#include "ffi/contract.h"
#include "xla/ffi/api/c_api.h"

// The FFI API of the headers that the handlers were compiled with; a runtime with a lower number
// refuses them.
DROPLESS_EXPORT int dropless_ffi_api_major(void) { return XLA_FFI_API_MAJOR; }
DROPLESS_EXPORT int dropless_ffi_api_minor(void) { return XLA_FFI_API_MINOR; }

DROPLESS_EXPORT int dropless_contract(void) { return DROPLESS_CONTRACT; }

DROPLESS_EXPORT const char* dropless_version(void) { return DROPLESS_VERSION; }

// Bytes of the workspace result of each target that has one; other targets need none. Sizes are
// those of the named letters; `element_bytes` is that of the rows' type.
DROPLESS_EXPORT int64_t dropless_route_workspace_bytes(int64_t tokens, int64_t num_experts) {
  return dropless::routing_workspace(tokens, num_experts).route_bytes;
}
DROPLESS_EXPORT int64_t dropless_route_of_terms_workspace_bytes(int64_t tokens,
                                                                int64_t num_experts) {
  return dropless::routing_workspace(tokens, num_experts).route_bytes;
}
DROPLESS_EXPORT int64_t dropless_plan_workspace_bytes(int64_t tokens, int64_t num_experts) {
  return dropless::routing_workspace(tokens, num_experts).plan_bytes;
}

static dropless::DType dtype_of_size(int64_t element_bytes) {
  if (element_bytes == 1) return dropless::DType::kF8E4M3;
  return element_bytes == 2 ? dropless::DType::kBF16 : dropless::DType::kF32;
}

DROPLESS_EXPORT int64_t dropless_expert_up_workspace_bytes(int64_t rows, int64_t model_dim,
                                                           int64_t element_bytes) {
  dropless::ExpertUpArgs args;
  args.x.dtype = dtype_of_size(element_bytes);
  args.x.dims[1] = model_dim;
  args.a.dims[0] = rows;
  return dropless::cuda::expert_up_workspace_bytes(args);
}
DROPLESS_EXPORT int64_t dropless_expert_down_backward_workspace_bytes(int64_t rows,
                                                                      int64_t model_dim,
                                                                      int64_t expert_dim,
                                                                      int64_t element_bytes) {
  dropless::ExpertDownBackwardArgs args;
  args.dy.dtype = dtype_of_size(element_bytes);
  args.dy.dims[1] = model_dim;
  args.h.dims[0] = rows;
  args.h.dims[2] = expert_dim;
  return dropless::cuda::expert_down_backward_workspace_bytes(args);
}
// dw [E, width, cols] of x [., width] and dy [., planes, cols]; gather as in the target, fp8 too,
// or 2 where the operand that is not gathered comes quantised.
DROPLESS_EXPORT int64_t dropless_grouped_wgrad_workspace_bytes(int64_t rows, int64_t width,
                                                               int64_t planes, int64_t cols,
                                                               int64_t num_experts, int64_t gather,
                                                               int64_t fp8, int64_t element_bytes) {
  dropless::GroupedWgradArgs args;
  args.x.dtype = dtype_of_size(element_bytes);
  args.x.dims[0] = rows;
  args.x.dims[1] = width;
  args.dy.dims[0] = rows;
  args.dy.dims[1] = planes;
  args.dy.dims[2] = cols;
  args.dw[0].dims[0] = num_experts;
  args.dw[0].dims[1] = width;
  args.dw[0].dims[2] = cols;
  args.slot_of_row.dims[0] = rows;
  args.gather = static_cast<dropless::Gather>(gather);
  args.fp8 = fp8 != 0;
  if (fp8 == 2) (args.gather == dropless::Gather::kLhs ? args.dy_scale : args.x_scale).rank = 3;
  return dropless::cuda::grouped_wgrad_workspace_bytes(args);
}
