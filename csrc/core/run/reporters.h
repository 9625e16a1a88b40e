#pragma once

#include <memory>
#include <vector>

#include "common/forks.h"
#include "common/sync.h"
#include "run/executor.h"
#include "transport/transport.h"

namespace meshcast {

// An object that reports to a store, or asks it.
class Reporting {
 public:
  virtual ~Reporting() = default;
  virtual void report() = 0;                   // throws nothing; the store may block it for ever
  virtual TimePoint waits_since() const = 0;   // for an answer of the store; TimePoint() if it does not
  virtual const void* connection() const = 0;  // reports over one connection come one after the other
};

// The threads of a process that talk to stores. There is none while there is nothing to report, and one as long
// as stores answer: a connection that owes an answer for longer than kStoreGrace keeps its thread, and another
// thread continues with the other connections. A thread in a store cannot be ended: torch reads from its socket
// without a limit. So nothing waits for a reporter, which keeps alive what it works for.
class Reporters {
 public:
  // A store that takes longer counts as one that does not answer.
  static constexpr std::chrono::milliseconds kStoreGrace{1000};

  static std::shared_ptr<Reporters> of_process();

  Reporters();
  Reporters(const Reporters&) = delete;
  Reporters& operator=(const Reporters&) = delete;

  // Its report() runs soon, once even if it is wanted several times before it begins. False if no thread is
  // available for it.
  bool want(const std::shared_ptr<Reporting>& who);
  void drop(const Reporting& who);  // unless it has begun

  // Whether that connection has owed an answer for longer than kStoreGrace.
  bool held_up(const void* connection) const;

 private:
  struct State {
    Mutex mutex;
    std::vector<std::shared_ptr<Reporting>> wanted;   // not begun
    std::vector<std::shared_ptr<Reporting>> running;  // at most one for each connection
  };

  static void report(State& state, const std::weak_ptr<Reporting>& who);

  const Origin origin_;
  const std::shared_ptr<State> state_;  // shared with the threads
  Executor threads_;
};

}  // namespace meshcast
