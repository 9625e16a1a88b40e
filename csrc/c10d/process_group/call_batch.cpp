#include "c10d/process_group/call_batch.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace meshcast {
namespace {

using c10d::Work;

// Several works as one. Like those of gloo's sends and receives it has no future.
class BatchWork final : public Work {
 public:
  BatchWork(int rank, std::vector<c10::intrusive_ptr<Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }

  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto found = work->exception()) return found;
    }
    return nullptr;
  }

  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }

  // The first error ends the wait: the group is of no more use then.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const auto limit = std::chrono::steady_clock::now() + timeout;
    for (const auto& work : works_) {
      auto left = timeout;
      if (timeout != kNoTimeout) {
        left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now());
        left = std::max(left, std::chrono::milliseconds(1));  // 0 would be no limit
      }
      if (!work->wait(left)) return false;
    }
    return true;
  }

 private:
  const std::vector<c10::intrusive_ptr<Work>> works_;
};

}  // namespace

void CallBatch::open() {
  // May hold the last references to tensors, which are freed without the lock.
  std::vector<c10::intrusive_ptr<Work>> left;
  const std::lock_guard lock(mutex_);
  left.swap(works_);
  gpu_.reset();
  open_ = true;
}

c10::intrusive_ptr<Work> CallBatch::started(c10::intrusive_ptr<Work> work) {
  if (open_ && work) {
    const std::lock_guard lock(mutex_);
    works_.push_back(work);
  }
  return work;
}

void CallBatch::enter(const c10::intrusive_ptr<c10d::Backend>& gpu) {
  if (!open_) return;
  const std::lock_guard lock(mutex_);
  if (gpu_) return;
  gpu->startCoalescing();
  gpu_ = gpu;
}

c10::intrusive_ptr<Work> CallBatch::close(int rank) {
  const std::lock_guard lock(mutex_);
  open_ = false;
  auto works = std::exchange(works_, {});
  if (const auto gpu = std::exchange(gpu_, nullptr)) {
    auto work = gpu->endCoalescing();
    if (works.empty()) return work;
    if (work) works.push_back(std::move(work));
  }
  return c10::make_intrusive<BatchWork>(rank, std::move(works));
}

}  // namespace meshcast
