#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/progress.h"
#include "transport/shm_mapping.h"
#include "transport/unix_socket.h"

namespace meshcast {

inline constexpr uint32_t kMaxShmGroups = 1024;  // of one process

// The two halves of a group's work on one rank.
enum class ShmHalf : uint32_t { Sending, Receiving };

// The sleeper that a call wakes.
enum class ShmSleeper : uint32_t { Nobody, Thread, Driver };

// Notifies a process that a half of one of its groups has work: called by its peers, which map it and hold the
// doorbells of its Progress, and by the process itself. There is one for each process, so that one thread can
// sleep for all groups. A sleeper announces itself, checks for calls once more and only then sleeps; a caller
// checks for the announcement after its call. Both sides use sequentially consistent operations, so that at
// least one of them sees the other. Peers can cause no more than a useless check by what they write here.
class Doorbell {
 public:
  explicit Doorbell(const Progress& progress);      // of this process
  explicit Doorbell(const std::vector<int>& peer);  // its fds() as received; throws std::runtime_error

  static constexpr size_t kFds = 3;
  std::vector<int> fds() const;  // of this process, for its peers

  // CPUs on which the process could run when the doorbell was made; none where that is unknown.
  using Cores = std::bitset<1024>;
  Cores cores() const;

  // To be called after the work has been published. Wakes the sleeper of that half, if there is one.
  void call(uint32_t group, ShmHalf half);

  // The functions below are for the process itself.
  int take(ShmHalf half, uint32_t* cursor);  // a group that was called, in turn, or -1
  bool called(ShmHalf half) const;
  void announce(ShmHalf half, ShmSleeper who);  // `who` is woken for it
  void wake(ShmSleeper who);

 private:
  static constexpr uint32_t kWords = kMaxShmGroups / 64;
  struct Page {
    uint64_t magic = 0;
    std::array<uint64_t, Cores{}.size() / 64> cores{};
    struct alignas(64) Half {
      std::atomic<uint32_t> sleeper{0};
      std::array<std::atomic<uint64_t>, kWords> calls{};
    };
    std::array<Half, 2> halves;
  };

  Page& page() const { return *static_cast<Page*>(memory_.base()); }
  Page::Half& half_of(ShmHalf half) const { return page().halves[static_cast<size_t>(half)]; }

  ShmMapping memory_;
  std::array<Descriptor, 2> doorbells_;  // indexed by Who
};

}  // namespace meshcast
