#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/agreement.h"
#include "c10d/bulletin.h"
#include "c10d/watch_threads.h"
#include "common/error.h"
#include "run/run_state.h"

namespace meshcast {

// What a watcher looks after: the runs of a group, wherever their tensors are. Thread-safe.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual std::vector<std::shared_ptr<RunState>> in_flight() = 0;
  virtual std::exception_ptr error() const = 0;
  virtual void fail(std::exception_ptr error) = 0;  // the first call counts
  virtual void check_peers() {}                     // now and then, while runs are in flight
};

// Decides when a group has failed and what the failure is called, so that no call blocks for ever and every
// rank names the same culprit. Over gloo one failure closes connections between innocent ranks too; so a rank
// that sees an error asks the bulletin for the first cause before it names anyone.
//
// It has turns in two threads, which all watchers of a process share: the reporter talks to the store and may
// be held up by it; the timer never does, and ends the runs with what this rank knows if the reporter does not
// answer in time.
class Watcher final : private WatchTurns {
 public:
  Watcher(Watched& engine, GroupIdentity group, const c10::intrusive_ptr<c10d::Store>& store);
  ~Watcher() override;

  void wake();  // a run was started
  void transport_failed(int32_t peer, const TransportError& error, const RunState& run);
  void run_failed(const Error& error, const RunState& run);  // with a text that names all there is to name
  void abort(const std::string& reason);
  void stop();  // no turns any more; not from one of them. Posts what only this rank knows.

 private:
  struct Local {  // what this rank saw, before the others were asked
    Cause cause;
    TimePoint seen;
    double elapsed = -1;
    double limit = -1;
    int64_t bytes_done = -1;
    int64_t bytes_expected = -1;
    std::string op;
    int64_t ordinal = -1;
  };

  bool report() override;
  bool tick() override;
  void report_once();
  void erase_old_postings(TimePoint now);
  void look_for_stalls(const std::shared_ptr<RunState>& run, TimePoint now);

  Cause describe_transport_error(int32_t peer, const TransportError& error, const RunState& run) const;
  void note_local(Cause cause, const RunState* run);
  void give_up(const Cause& cause);  // fails the engine, under the first cause
  bool failed() const { return engine_.error() != nullptr; }

  Watched& engine_;
  const GroupIdentity group_;
  Bulletin bulletin_;

  std::mutex mutex_;
  std::optional<Local> local_;
  bool published_ = false;  // the bulletin knows a cause; from then on nothing is left to report

  // The reporter's own notes, touched by no other thread.
  struct Posted {
    TimePoint when;
    std::weak_ptr<RunState> run;
  };
  std::map<std::pair<int32_t, int64_t>, Posted> posted_;  // calls (lane, ordinal) that are on the bulletin
  TimePoint last_look_{};

  TimePoint failed_at_{};  // as the timer found it

  const std::shared_ptr<WatchThreads> threads_;
  bool watched_ = true;  // until stop(), which one thread calls
};

}  // namespace meshcast
