// The C ABI that both shared libraries export beside their handlers. Included once in each of them.
#pragma once

#include "ffi/contract.h"
#include "xla/ffi/api/c_api.h"

// The FFI API of the headers that the handlers were compiled with; a runtime with a lower number refuses
// them.
DROPLESS_EXPORT int dropless_ffi_api_major(void) { return XLA_FFI_API_MAJOR; }
DROPLESS_EXPORT int dropless_ffi_api_minor(void) { return XLA_FFI_API_MINOR; }

DROPLESS_EXPORT int dropless_contract(void) { return DROPLESS_CONTRACT; }

DROPLESS_EXPORT const char* dropless_version(void) { return DROPLESS_VERSION; }
