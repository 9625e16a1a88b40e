#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/reshard_work.h"
#include "cuda/device/cuda_device.h"
#include "rounds/round_engine.h"

namespace meshcast {

// The Work of one reshard on a GPU, with what users of NCCL's expect: wait() orders the current stream behind
// the transfer and does not block the host; over CUDA IPC only until the peers have made the same call. That
// the transfer is over on the GPU is what isCompleted() tells, and what completes the future; both keep the
// type of an error.
class CudaWork final : public c10d::Work {
 public:
  CudaWork(int rank, std::shared_ptr<RoundRun> run, std::shared_ptr<RoundEngine> engine,
           std::shared_ptr<CudaDevice> device, std::shared_ptr<RecycleBin> bin,
           std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // The limit is that of the call: there is nothing here to wait for. Raises an error that is known by now; one
  // that comes later ends the future and refuses the group's later calls.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  const RoundRun& run() const { return *run_; }

 private:
  const std::shared_ptr<RoundRun> run_;
  const std::shared_ptr<RoundEngine> engine_;
  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<RecycleBin> bin_;
  const std::vector<at::Tensor> outputs_;

  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when somebody asks for it
};

}  // namespace meshcast
