#include "dropless/cpu_kernel.h"
#include "ffi/abi.h"

DROPLESS_EXPORT const char* dropless_cpu_kernel(void) { return dropless::cpu::kernel_name(); }
