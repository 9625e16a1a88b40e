#include "transport/shm_budget.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace meshcast {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kLargestShare = 1024 * kKiB;  // fits into a core's own cache
constexpr int64_t kLeastGroup = 512 * kKiB;     // below this, copying in pieces costs more than it saves
constexpr int64_t kLeastPair = 128 * kKiB;      // the same, with smaller pieces
constexpr int64_t kGroupPart = 8;               // of what is left
constexpr int64_t kPairPart = 16;               // so that 64 ranks of a host can all have pairs
constexpr int64_t kKeptForGroups = 4;           // this part of all, from pairs

std::mutex budget_mutex;
int64_t budget_total = int64_t{64} * 1024 * kKiB;
int64_t budget_left = budget_total;

int64_t take(int64_t spare, int64_t part, int64_t least, int64_t unit) {
  const int64_t share = std::min(kLargestShare, spare / part);
  if (share < least) {
    throw std::runtime_error("the shared memory that this process may use (" +
                             std::to_string(budget_total >> 20) + " MiB) is used up by its other groups");
  }
  const int64_t nbytes = share / unit * unit;
  budget_left -= nbytes;
  return nbytes;
}

}  // namespace

void set_shm_budget(int64_t nbytes) {
  const std::lock_guard lock(budget_mutex);
  budget_left += nbytes - budget_total;
  budget_total = nbytes;
}

ShmShare ShmShare::of_group(int64_t unit) {
  const std::lock_guard lock(budget_mutex);
  return ShmShare(take(budget_left, kGroupPart, kLeastGroup, unit));
}

ShmShare ShmShare::of_pair(int64_t unit) {
  const std::lock_guard lock(budget_mutex);
  return ShmShare(take(budget_left - budget_total / kKeptForGroups, kPairPart, kLeastPair, unit));
}

ShmShare::~ShmShare() {
  const std::lock_guard lock(budget_mutex);
  budget_left += nbytes_;
}

ShmShare::ShmShare(ShmShare&& other) noexcept : nbytes_(std::exchange(other.nbytes_, 0)) {}

ShmShare& ShmShare::operator=(ShmShare&& other) noexcept {
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

}  // namespace meshcast
