#pragma once

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "common/error.h"
#include "rounds/device.h"

namespace meshcast {

// For the calls of one scope: the GPU, and leave to make them while another thread captures a CUDA graph.
class OnDevice {
 public:
  explicit OnDevice(int device)
      : guard_(static_cast<c10::DeviceIndex>(device)), mode_(cudaStreamCaptureModeThreadLocal) {}

 private:
  const c10::cuda::CUDAGuard guard_;
  const c10::cuda::CUDAStreamCaptureModeGuard mode_;
};

// `what`: the failed action, for the message.
inline void check_cuda(cudaError_t status, const char* what, int device) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next check of other code would find it
  throw Error(ErrorKind::Generic, fmt::format("{} on CUDA device {} failed: {} ({})", what, device,
                                              cudaGetErrorName(status), cudaGetErrorString(status)));
}

// For ends, where nothing can be done about an error: it is not left for the next check of other code.
inline void let_go(cudaError_t status) noexcept {
  if (status != cudaSuccess) cudaGetLastError();
}

inline cudaStream_t stream_of(RoundDevice::Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
inline cudaEvent_t event_of(RoundDevice::Event event) { return reinterpret_cast<cudaEvent_t>(event); }

inline void destroy_event(RoundDevice::Event event, int device) noexcept {
  try {
    const OnDevice here(device);
    let_go(cudaEventDestroy(event_of(event)));
  } catch (const std::exception&) {
    // CUDA has ended, and its events with it.
  }
}

template <class Pointer>
std::uintptr_t handle_of(Pointer pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace meshcast
