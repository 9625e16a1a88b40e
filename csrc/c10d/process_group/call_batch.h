#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace meshcast {

// The calls between startCoalescing and endCoalescing, whose device torch does not report. Those on GPUs are
// one batch of their backend; those on the CPU start at once, as without a batch, and are waited for together.
// Any thread.
class CallBatch {
 public:
  // Begins a batch. One that was left open, as after an error inside it, is forgotten.
  void open();

  // A call on the CPU that has started: part of the batch if one is open. Returns its own work.
  c10::intrusive_ptr<c10d::Work> started(c10::intrusive_ptr<c10d::Work> work);

  // Before a call on GPUs: opens the batch of their backend, once, if one is open here.
  void enter(const c10::intrusive_ptr<c10d::Backend>& gpu);

  // Ends the batch: the work of all its calls, which is done at once if there were none.
  c10::intrusive_ptr<c10d::Work> close(int rank);

 private:
  std::atomic<bool> open_ = false;  // asked by every call; the rest is touched inside batches only
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  c10::intrusive_ptr<c10d::Backend> gpu_;
};

}  // namespace meshcast
