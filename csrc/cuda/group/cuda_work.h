#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "c10d/reshard_work.h"
#include "cuda/device/cuda_device.h"
#include "rounds/round_engine.h"

namespace meshcast {

// The Work of one reshard on a GPU, which behaves as NCCL's: wait() orders the current stream behind the
// transfer and does not block the host; over CUDA IPC only until the peers have made the same call.
// isCompleted() returns whether the transfer is over on the GPU, which also completes the future; both keep the
// type of an error.
class CudaWork final : public ReshardWork {
 public:
  CudaWork(int rank, const std::shared_ptr<RoundRun>& run, std::shared_ptr<RoundEngine> engine,
           std::shared_ptr<CudaDevice> device, std::shared_ptr<RecycleBin> bin,
           std::vector<at::Tensor> outputs);

  // The limit is that of the call: there is nothing here to wait for. Raises an error that is known by now; one
  // that comes later ends the future and refuses the group's later calls.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

 private:
  Promise promise() const override;

  const std::shared_ptr<RoundEngine> engine_;
  const std::shared_ptr<CudaDevice> device_;
};

}  // namespace meshcast
