#include "run/plan_order.h"

namespace meshcast {

PlanOrder::PlanOrder(int32_t count, int32_t ahead)
    // A short program needs no order, and no record of it.
    : ahead_(ahead), done_(static_cast<size_t>(count <= ahead ? 0 : count), false), limit_(ahead) {}

bool PlanOrder::done(int32_t number) {
  if (done_.empty()) return false;
  const std::lock_guard lock(mutex_);
  done_[static_cast<size_t>(number)] = true;
  const auto count = static_cast<int32_t>(done_.size());
  const int32_t before = first_;
  while (first_ < count && done_[static_cast<size_t>(first_)]) ++first_;
  limit_.store(first_ + ahead_);
  return first_ != before && before + ahead_ < count;
}

}  // namespace meshcast
