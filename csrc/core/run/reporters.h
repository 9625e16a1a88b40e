#pragma once

#include <memory>
#include <vector>

#include "common/forks.h"
#include "common/sync.h"
#include "run/executor.h"
#include "transport/transport.h"

namespace meshcast {

// Who has something to tell a store, or to ask of it.
class Reporting {
 public:
  virtual ~Reporting() = default;
  virtual void report() = 0;                   // throws nothing; the store may hold it up for good
  virtual TimePoint waits_since() const = 0;   // for an answer of the store; TimePoint() while it does not
  virtual const void* connection() const = 0;  // reports over one connection come one after the other
};

// The threads of a process that talk to stores. There is none while nobody has anything to say, and one as long
// as stores answer: each connection that owes an answer for longer than kStoreGrace keeps the thread that waits
// for it, and another goes on for those who have other connections. A thread in a store cannot be ended: torch
// reads from its socket without a limit. So nothing waits for a reporter, which keeps alive what it works for.
class Reporters {
 public:
  // A store that takes longer is taken for one that does not answer.
  static constexpr std::chrono::milliseconds kStoreGrace{1000};

  static std::shared_ptr<Reporters> of_process();

  Reporters();
  Reporters(const Reporters&) = delete;
  Reporters& operator=(const Reporters&) = delete;

  // Its report() comes soon, once however often it is wanted before it begins. False where it will not, for
  // want of a thread.
  bool want(const std::shared_ptr<Reporting>& who);
  void drop(const Reporting& who);  // unless it has begun

  // Whether that connection has owed an answer for longer than kStoreGrace.
  bool held_up(const void* connection) const;

 private:
  struct State {
    Mutex mutex;
    std::vector<std::shared_ptr<Reporting>> wanted;   // and not begun
    std::vector<std::shared_ptr<Reporting>> running;  // one for each connection at most
  };

  static void report(State& state, const std::weak_ptr<Reporting>& who);

  const Origin origin_;
  const std::shared_ptr<State> state_;  // shared with the threads
  Executor threads_;
};

}  // namespace meshcast
