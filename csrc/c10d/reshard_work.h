#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "run/run.h"

namespace meshcast {

// Tensors (and futures that hold tensors) whose last reference an engine thread let go of. Freeing a tensor
// may need the GIL, which such a thread must never wait for: user threads empty the bin instead.
class RecycleBin : public std::enable_shared_from_this<RecycleBin> {
 public:
  struct Bag {
    std::vector<at::Tensor> tensors;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  // The bag lands in the bin, not on the floor, when the last reference goes.
  std::shared_ptr<Bag> bag(Bag contents);

  void empty();  // user threads only

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Bag>> bags_;
};

// The Work of one reshard. Unlike gloo's it can be polled, has a future, and keeps the type of its error.
class ReshardWork final : public c10d::Work {
 public:
  // `tensors`: everything the run touches, outputs last; `outputs`: how many of them are results.
  ReshardWork(int rank, std::shared_ptr<Run> run, std::shared_ptr<RecycleBin> bin,
              std::vector<at::Tensor> outputs, uint64_t sequence);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // 0 = as long as the call's own limit allows, which bounds it. A shorter limit that expires raises
  // DeadlineExceeded and leaves the transfer running.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  const Run& run() const { return *run_; }

 private:
  const std::shared_ptr<Run> run_;
  const std::shared_ptr<RecycleBin> bin_;
  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // null until somebody asks: most never do
};

}  // namespace meshcast
