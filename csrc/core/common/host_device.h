#pragma once

// Marks code for both the CPU and kernels. Without a CUDA compiler it is empty, so that the same functions that
// a kernel's thread runs can be run, and tested, on the host.
#if defined(__CUDACC__)
#define MESHCAST_HOST_DEVICE __host__ __device__
#else
#define MESHCAST_HOST_DEVICE
#endif

// Before a loop over registers: an array that is indexed by anything except constants would be in memory.
#if defined(__CUDA_ARCH__)
#define MESHCAST_UNROLL _Pragma("unroll")
#else
#define MESHCAST_UNROLL
#endif
