#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace meshcast {

// What has to be looked at now and then. A turn answers whether there will be something to look at soon.
class WatchTurns {
 public:
  virtual ~WatchTurns() = default;
  virtual bool report() = 0;  // may be held up by the store
  virtual bool tick() = 0;    // may not
};

// The two threads of a process that give turns to the watchers of all its private groups. They sleep while no
// watcher has anything to look at.
class WatchThreads {
 public:
  // Those of this process: made for the first watcher, gone with the last.
  static std::shared_ptr<WatchThreads> of_process();

  WatchThreads();
  ~WatchThreads();
  WatchThreads(const WatchThreads&) = delete;
  WatchThreads& operator=(const WatchThreads&) = delete;

  void add(WatchTurns& watcher);

  // Afterwards it has no turn any more; waits for one that runs. Not from a turn.
  void remove(WatchTurns& watcher);

  // There may be something to look at. urgent: at once, also where other watchers are waited for.
  void wake(bool urgent);

 private:
  enum Loop : uint8_t { kReporter, kTimer };

  void loop(Loop which);

  const pid_t pid_;

  std::mutex mutex_;
  std::condition_variable changed_;  // for the two threads
  std::condition_variable left_;     // for remove(): a turn is over
  std::vector<WatchTurns*> watchers_;
  std::array<WatchTurns*, 2> turn_{};  // whose turn it is in either thread
  std::array<std::thread, 2> threads_;
  bool stopping_ = false;
  std::atomic<uint64_t> wakes_{0};   // tells a thread that falls asleep whether there was one meanwhile
  std::atomic<uint64_t> urgent_{0};  // of these, the urgent ones
  std::atomic<int> asleep_{0};       // threads that sleep until a wake
};

}  // namespace meshcast
