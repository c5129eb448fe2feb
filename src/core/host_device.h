// Marks functions that CUDA kernels share with host code.
#pragma once

#ifdef __CUDACC__
#define DROPLESS_HOST_DEVICE __host__ __device__
#else
#define DROPLESS_HOST_DEVICE
#endif
