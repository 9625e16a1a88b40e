#pragma once

#include <cuda_runtime_api.h>

namespace meshcast::cuda {

// A function of the CUDA driver, asked for at run time: the import works where there is no driver. Null where
// the driver is older than `release`, such as 12040 for CUDA 12.4.
template <class Function>
Function driver_function(const char* name, unsigned release) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, release, cudaEnableDefault, &result);
  if (status != cudaSuccess) cudaGetLastError();  // else the next check of other code would find it
  const bool found = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return found ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace meshcast::cuda
