#include "common/keep_for_good.h"

#include <mutex>
#include <utility>
#include <vector>

namespace meshcast {

void keep_for_good(std::shared_ptr<void> memory) {
  static auto& mutex = *new std::mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;  // usable also while the process ends
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace meshcast
