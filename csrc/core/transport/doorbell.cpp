#include "transport/doorbell.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <stdexcept>

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

namespace meshcast {
namespace {

constexpr uint64_t kDoorbellMagic = 0x6d6362656c6c3033;  // changes with the layout of Doorbell::Page

Descriptor copy_of(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail_with_errno("fcntl");
  return Descriptor(copy);
}

}  // namespace

Doorbell::Doorbell(const Progress& progress)
    : memory_("meshcast-doorbell", sizeof(Page)),
      doorbells_{copy_of(progress.doorbell(Who::Thread)), copy_of(progress.doorbell(Who::Driver))} {
  auto* const page = new (memory_.base()) Page;
  page->magic = kDoorbellMagic;
  cpu_set_t here;
  static_assert(sizeof(here) == sizeof(page->cores));
  if (sched_getaffinity(0, sizeof(here), &here) == 0) std::memcpy(page->cores.data(), &here, sizeof(here));
}

Doorbell::Doorbell(const std::vector<int>& peer)
    : memory_(peer[0], sizeof(Page)), doorbells_{copy_of(peer[1]), copy_of(peer[2])} {
  if (page().magic != kDoorbellMagic)
    throw std::runtime_error("a peer's doorbell has another form; is its meshcast another version?");
}

std::vector<int> Doorbell::fds() const { return {memory_.fd(), doorbells_[0].get(), doorbells_[1].get()}; }

Doorbell::Cores Doorbell::cores() const {
  Cores found;
  for (size_t i = page().cores.size(); i-- > 0;) found = found << 64 | Cores(page().cores[i]);
  return found;
}

void Doorbell::call(uint32_t group, ShmHalf half) {
  half_of(half).calls[group / 64 % kWords].fetch_or(uint64_t{1} << group % 64);
  const auto who = static_cast<ShmSleeper>(half_of(half).sleeper.load());
  if (who != ShmSleeper::Nobody) wake(who);
}

int Doorbell::take(ShmHalf half, uint32_t* cursor) {
  auto& calls = half_of(half).calls;
  for (uint32_t i = 0; i <= kWords; ++i) {
    // The first word comes a second time at the end, for its groups before the cursor.
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

bool Doorbell::called(ShmHalf half) const {
  const auto& calls = half_of(half).calls;
  return std::any_of(calls.begin(), calls.end(), [](const auto& word) { return word.load() != 0; });
}

void Doorbell::announce(ShmHalf half, ShmSleeper who) {
  half_of(half).sleeper.store(static_cast<uint32_t>(who));
}

void Doorbell::wake(ShmSleeper who) {
  const uint64_t one = 1;
  const int doorbell = doorbells_[who == ShmSleeper::Driver ? 1 : 0].get();
  [[maybe_unused]] const auto written = write(doorbell, &one, sizeof(one));  // a full counter rings already
}

}  // namespace meshcast
