#include "run/carries.h"

#include <algorithm>
#include <utility>

namespace meshcast {

Carries::Carries(const Program& program)
    : most_(program.most_carried), sends_left_(program.carried_sends), kept_(program.carried_sends.size()) {}

bool Carries::may_take(int32_t number) const {
  const std::lock_guard lock(mutex_);
  return number - released_ < most_;
}

std::vector<std::byte> Carries::take(int64_t nbytes) {
  std::vector<std::byte> out;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      out = std::move(spare_.back());
      spare_.pop_back();
    }
    peak_ = std::max(peak_, ++in_use_);
  }
  out.resize(static_cast<size_t>(nbytes));
  return out;
}

void Carries::keep(int32_t number, std::vector<std::byte> value) {
  const std::lock_guard lock(mutex_);
  kept_[static_cast<size_t>(number)] = std::move(value);
}

std::byte* Carries::data(int32_t number) {
  const std::lock_guard lock(mutex_);
  return kept_[static_cast<size_t>(number)].data();
}

bool Carries::sent(int32_t number) {
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<size_t>(number);
  if (--sends_left_[at] > 0) return false;
  spare_.push_back(std::move(kept_[at]));
  ++released_;
  --in_use_;
  return true;
}

int32_t Carries::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace meshcast
