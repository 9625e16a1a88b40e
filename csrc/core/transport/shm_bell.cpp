#include "transport/shm_bell.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>
#include <ctime>
#include <new>
#include <stdexcept>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace meshcast {
namespace {

constexpr uint64_t kBellMagic = 0x6d6362656c6c3031;  // changes with the layout of ShmBell::Page

// Not the private flavour: the word is shared between processes. `limit`: of CLOCK_MONOTONIC.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit, ShmSleeper who) {
  static_assert(sizeof(*word) == sizeof(uint32_t), "a futex is a bare 32-bit word");
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr,
          static_cast<uint32_t>(who));
}

}  // namespace

ShmBell::ShmBell() : memory_("meshcast-bell", sizeof(Page)) { (new (memory_.base()) Page)->magic = kBellMagic; }

ShmBell::ShmBell(int fd) : memory_(fd, sizeof(Page)) {
  if (page().magic != kBellMagic)
    throw std::runtime_error("a peer's bell has another form; is its meshcast another version?");
}

void ShmBell::call(uint32_t group, ShmHalf half) {
  half_of(half).calls[group / 64 % kWords].fetch_or(uint64_t{1} << group % 64);
  const auto who = static_cast<ShmSleeper>(half_of(half).sleeper.load());
  if (who != ShmSleeper::Nobody) wake(who);
}

int ShmBell::take(ShmHalf half, uint32_t* cursor) {
  auto& calls = half_of(half).calls;
  for (uint32_t i = 0; i <= kWords; ++i) {
    // The first word a second time at the end, for its groups before the cursor.
    const uint32_t word = (*cursor / 64 + i) % kWords;
    uint64_t set = calls[word].load();
    if (i == 0) set &= ~uint64_t{0} << *cursor % 64;
    if (set == 0) continue;
    const auto bit = static_cast<uint32_t>(std::countr_zero(set));
    const uint64_t mask = uint64_t{1} << bit;
    if ((calls[word].fetch_and(~mask) & mask) == 0) continue;  // another thread took it
    *cursor = (word * 64 + bit + 1) % kMaxShmGroups;
    return static_cast<int>(word * 64 + bit);
  }
  return -1;
}

bool ShmBell::called(ShmHalf half) const {
  const auto& calls = half_of(half).calls;
  return std::any_of(calls.begin(), calls.end(), [](const auto& word) { return word.load() != 0; });
}

void ShmBell::announce(ShmHalf half, ShmSleeper who) {
  half_of(half).sleeper.store(static_cast<uint32_t>(who));
}

uint32_t ShmBell::rings() const { return page().rings.load(); }

void ShmBell::sleep(ShmSleeper who, uint32_t rings, TimePoint limit) {
  const auto since = std::chrono::nanoseconds(limit.time_since_epoch()).count();
  const timespec until{static_cast<time_t>(since / 1'000'000'000), static_cast<long>(since % 1'000'000'000)};
  futex(&page().rings, FUTEX_WAIT_BITSET, rings, limit == TimePoint::max() ? nullptr : &until, who);
}

void ShmBell::wake(ShmSleeper who) {
  page().rings.fetch_add(1);
  futex(&page().rings, FUTEX_WAKE_BITSET, INT_MAX, nullptr, who);
}

}  // namespace meshcast
