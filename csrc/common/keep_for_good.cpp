#include "common/keep_for_good.h"

#include <mutex>
#include <utility>
#include <vector>

namespace meshcast {

void keep_for_good(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static std::vector<std::shared_ptr<void>> kept;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace meshcast
