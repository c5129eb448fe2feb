#include <cuda_runtime_api.h>

#include "ffi/contract.h"

// CUDA release that the library was compiled with, 1000 * major + 10 * minor, as cuDriverGetVersion
// counts.
DROPLESS_EXPORT int dropless_cuda_release(void) { return CUDART_VERSION; }
