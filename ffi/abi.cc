// The C ABI that both shared libraries export beside their handlers; compiled into each of them.

#include <cstdint>

#include "core/routing_chunks.h"
#include "ffi/contract.h"
#include "xla/ffi/api/c_api.h"

// The FFI API of the headers that the handlers were compiled with; a runtime with a lower number
// refuses them.
DROPLESS_EXPORT int dropless_ffi_api_major(void) { return XLA_FFI_API_MAJOR; }
DROPLESS_EXPORT int dropless_ffi_api_minor(void) { return XLA_FFI_API_MINOR; }

DROPLESS_EXPORT int dropless_contract(void) { return DROPLESS_CONTRACT; }

DROPLESS_EXPORT const char* dropless_version(void) { return DROPLESS_VERSION; }

// Bytes of the workspace result of each target that has one, by T and E.
DROPLESS_EXPORT int64_t dropless_route_workspace_bytes(int64_t tokens, int64_t num_experts) {
  return dropless::routing_workspace(tokens, num_experts).route_bytes;
}
DROPLESS_EXPORT int64_t dropless_plan_workspace_bytes(int64_t tokens, int64_t num_experts) {
  return dropless::routing_workspace(tokens, num_experts).plan_bytes;
}
