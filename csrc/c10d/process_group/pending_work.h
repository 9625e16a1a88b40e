#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "common/forks.h"

namespace meshcast {

// The Work of a collective that a reshard carries out, from the moment it is called: the reshard itself starts
// later where its ranks have not met or agreed yet. Its owner calls settle() or fail(), once.
class PendingWork final : public c10d::Work {
 public:
  // `tensors`: the results, which are also those of the future.
  PendingWork(int rank, c10d::OpType op, const char* title, std::vector<at::Tensor> tensors);

  // From any thread, with any lock held: callbacks are called by the executor.
  void settle(c10::intrusive_ptr<c10d::Work> running);
  void fail(std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // Without a limit of its own it waits up to the call's, which also ends a queued call.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Null until settled.
  c10::intrusive_ptr<c10d::Work> running() const;
  std::exception_ptr refused() const;
  void settle_with(c10::intrusive_ptr<c10d::Work> running, std::exception_ptr refused);

  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  static void complete(const FuturePtr& future, const std::vector<at::Tensor>& tensors,
                       const c10::intrusive_ptr<c10d::Work>& running, const std::exception_ptr& refused);

  const Origin origin_;
  const std::vector<at::Tensor> tensors_;

  // Not Work's own mutex_, which the base class locks in its own functions.
  mutable std::mutex state_mutex_;
  std::condition_variable settled_;
  c10::intrusive_ptr<c10d::Work> running_;
  std::exception_ptr refused_;    // why it was never started
  FuturePtr future_;              // null until it is requested
  std::shared_ptr<void> thread_;  // for its callbacks
};

}  // namespace meshcast
