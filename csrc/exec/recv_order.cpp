#include "exec/recv_order.h"

namespace meshcast {

RecvOrder::RecvOrder(int32_t count)
    // A short program needs no order, and no notes.
    : arrived_(static_cast<size_t>(count <= kRecvsAhead ? 0 : count), false), limit_(kRecvsAhead) {}

bool RecvOrder::arrived(int32_t number) {
  if (arrived_.empty()) return false;
  const std::lock_guard lock(mutex_);
  arrived_[static_cast<size_t>(number)] = true;
  const auto count = static_cast<int32_t>(arrived_.size());
  const int32_t before = first_;
  while (first_ < count && arrived_[static_cast<size_t>(first_)]) ++first_;
  limit_.store(first_ + kRecvsAhead);
  return first_ != before && before + kRecvsAhead < count;
}

}  // namespace meshcast
