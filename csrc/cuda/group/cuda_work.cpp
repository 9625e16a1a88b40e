#include "cuda/group/cuda_work.h"

#include <utility>

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "common/error.h"

namespace meshcast {
namespace {

using c10::ivalue::Future;

// Completes the future as if on the transfer's own stream, where everything is over.
void complete(const RecycleBin::Bag& bag, const std::exception_ptr& error, RoundDevice::Stream stream,
              int device) {
  if (error) return bag.future->setError(error);
  try {
    const c10::cuda::CUDAStreamCaptureModeGuard mode(cudaStreamCaptureModeThreadLocal);
    const c10::cuda::CUDAStreamGuard here(c10::cuda::getStreamFromExternal(
        reinterpret_cast<cudaStream_t>(stream), static_cast<c10::DeviceIndex>(device)));
    bag.future->markCompleted(c10::IValue(bag.tensors));
  } catch (const std::exception&) {  // CUDA has failed for this process
    bag.future->setErrorIfNeeded(std::current_exception());
  }
}

}  // namespace

CudaWork::CudaWork(int rank, std::shared_ptr<RoundRun> run, std::shared_ptr<RoundEngine> engine,
                   std::shared_ptr<CudaDevice> device, std::shared_ptr<RecycleBin> bin,
                   std::vector<at::Tensor> outputs)
    : Work(rank, c10d::OpType::UNKNOWN, "meshcast:reshard"),
      run_(std::move(run)),
      engine_(std::move(engine)),
      device_(std::move(device)),
      bin_(std::move(bin)),
      outputs_(std::move(outputs)) {}

bool CudaWork::isCompleted() { return run_->ended(); }

bool CudaWork::isSuccess() const { return run_->ended() && !run_->error(); }

std::exception_ptr CudaWork::exception() const { return run_->error(); }

int CudaWork::sourceRank() const { throw Error(ErrorKind::Generic, "a reshard has no single source rank"); }

std::vector<at::Tensor> CudaWork::result() { return outputs_; }

void CudaWork::synchronize() { wait(kNoTimeout); }

bool CudaWork::wait(std::chrono::milliseconds /*timeout*/) {
  const auto index = static_cast<c10::DeviceIndex>(device_->device());
  const cudaStream_t current = c10::cuda::getCurrentCUDAStream(index).stream();
  engine_->follow(*run_, reinterpret_cast<RoundDevice::Stream>(current));
  bin_->empty();
  if (const auto error = run_->error()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<Future> CudaWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (future_) return future_;
  const auto index = static_cast<c10::DeviceIndex>(device_->device());
  future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                        std::vector<c10::Device>{{c10::DeviceType::CUDA, index}});
  // The run holds the callback, and the engine holds the run until it has ended.
  run_->on_end([bag = bin_->bag({outputs_, future_}), run = std::weak_ptr<RoundRun>(run_), device = device_] {
    const auto self = run.lock();
    complete(*bag, self ? self->error() : nullptr, device->transfer_stream(), device->device());
  });
  return future_;
}

uint64_t CudaWork::getSequencenumber() const { return static_cast<uint64_t>(run_->label().ordinal); }

}  // namespace meshcast
