#include "cuda/group/cuda_work.h"

#include <utility>

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace meshcast {
namespace {

using c10::ivalue::Future;

// Completes the future as if on the transfer's own stream, where everything is over.
void complete(Future& future, const std::vector<at::Tensor>& outputs, RoundDevice::Stream stream, int device) {
  try {
    const c10::cuda::CUDAStreamCaptureModeGuard mode(cudaStreamCaptureModeThreadLocal);
    const c10::cuda::CUDAStreamGuard here(c10::cuda::getStreamFromExternal(
        reinterpret_cast<cudaStream_t>(stream), static_cast<c10::DeviceIndex>(device)));
    future.markCompleted(c10::IValue(outputs));
  } catch (const std::exception&) {  // CUDA has failed for this process
    future.setErrorIfNeeded(std::current_exception());
  }
}

}  // namespace

CudaWork::CudaWork(int rank, const std::shared_ptr<RoundRun>& run, std::shared_ptr<RoundEngine> engine,
                   std::shared_ptr<CudaDevice> device, std::shared_ptr<RecycleBin> bin,
                   std::vector<at::Tensor> outputs)
    : ReshardWork(rank, run, std::move(bin), std::move(outputs)),
      engine_(std::move(engine)),
      device_(std::move(device)) {}

bool CudaWork::wait(std::chrono::milliseconds /*timeout*/) {
  const auto index = static_cast<c10::DeviceIndex>(device_->device());
  const cudaStream_t current = c10::cuda::getCurrentCUDAStream(index).stream();
  engine_->follow(static_cast<const RoundRun&>(*run_), reinterpret_cast<RoundDevice::Stream>(current));
  return raise_or_true();
}

ReshardWork::Promise CudaWork::promise() const {
  const auto index = static_cast<c10::DeviceIndex>(device_->device());
  return {c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                      std::vector<c10::Device>{{c10::DeviceType::CUDA, index}}),
          [device = device_](Future& future, const std::vector<at::Tensor>& outputs) {
            complete(future, outputs, device->transfer_stream(), device->device());
          }};
}

}  // namespace meshcast
