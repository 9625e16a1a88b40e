#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "common/forks.h"
#include "run/run_state.h"

namespace meshcast {

class Watcher;

// Tensors whose last reference an engine thread has dropped. Freeing a tensor may need the GIL, which such a
// thread must never wait for: threads of users, and of the executor, empty the bin instead.
class RecycleBin : public std::enable_shared_from_this<RecycleBin> {
 public:
  struct Bag {
    std::vector<at::Tensor> tensors;
    std::unique_ptr<Bag> next = nullptr;  // in the bin, so that adding it needs no memory
  };

  ~RecycleBin() { empty(); }

  // The bag goes to the bin when its last reference is dropped.
  std::shared_ptr<Bag> bag(std::vector<at::Tensor> tensors);

  void empty();

 private:
  const Origin origin_;
  std::mutex mutex_;
  std::unique_ptr<Bag> bags_;
};

// The Work of one reshard. In contrast to gloo's it can be polled, has a future, and keeps the type of its
// error.
class ReshardWork : public c10d::Work {
 public:
  // `outputs`: those of the run's tensors that are results. `watcher`: is notified of a wait that a signal
  // ends.
  ReshardWork(int rank, std::shared_ptr<RunState> run, std::shared_ptr<RecycleBin> bin,
              std::vector<at::Tensor> outputs, std::weak_ptr<Watcher> watcher = {});
  ~ReshardWork() override { bin_->empty(); }

  // In a forked child, where wait() raises at once, it is completed without a success.
  bool isCompleted() override;
  bool isSuccess() const override { return !origin_.foreign() && run_->ended() && !run_->error(); }
  std::exception_ptr exception() const override {
    return !origin_.foreign() && run_->ended() ? run_->error() : nullptr;
  }
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  // 0 = as long as the call's own limit allows, which bounds it. A shorter limit that expires raises
  // DeadlineExceeded and leaves the transfer running. An exception from the handler of a signal ends the wait
  // and aborts the group.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return static_cast<uint64_t>(run_->label().ordinal); }

  const RunState& run() const { return *run_; }

 protected:
  // A future, and how it is completed once the run has ended well. That holds nothing of this Work, which may
  // be destroyed by then.
  struct Promise {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::function<void(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs)> complete;
  };
  virtual Promise promise() const;

  bool raise_or_true() const;  // the run's error, if it has one by now

  const std::shared_ptr<RunState> run_;
  const std::shared_ptr<RecycleBin> bin_;

 private:
  bool ended_by(TimePoint limit, bool driven);

  const Origin origin_;
  const std::vector<at::Tensor> outputs_;
  const std::weak_ptr<Watcher> watcher_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // null until it is requested, which is rare
};

}  // namespace meshcast
