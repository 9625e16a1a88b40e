#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/forks.h"
#include "common/sync.h"

namespace meshcast {

class Flight;
class Start;
class Traffic;

// Messages and bytes of one call, from one rank to another.
struct Moved {
  int32_t sender = 0;
  int32_t receiver = 0;
  int64_t messages = 0;
  int64_t nbytes = 0;
};

// Sums over calls. seconds: from start to finish; waited: in wait(); bound: of their plans; moving_seconds:
// `seconds` of the calls whose plan has a bound.
struct CallSums {
  int64_t calls = 0;  // that have ended without an error
  int64_t failed = 0;
  int64_t retries = 0;
  int64_t messages = 0;
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  double seconds = 0;
  double waited = 0;
  double bound = 0;
  double moving_seconds = 0;

  CallSums& operator+=(const CallSums& other);
};

struct Counted {
  std::map<std::string, CallSums> calls;  // by operation
  std::map<std::pair<int32_t, int32_t>, CallSums>
      pairs;  // by sender and receiver; their bytes are `bytes_sent`
};

// The calls of this process: the last ones, and sums over all. A forked child begins with none. Thread-safe; a
// thread that holds its lock waits for nothing else.
class Record {
 public:
  static Record& of_process();

  std::vector<std::shared_ptr<const Flight>> flights() const;  // the oldest first
  int64_t begun() const;                                       // calls, ever
  Counted counted() const;
  // For calls of this operation that move nothing, or fail before they do.
  Traffic& traffic_of(const std::string& op);

 private:
  friend class Flight;
  friend class Traffic;

  const Origin origin_;
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<const Flight>> flights_;
  int64_t begun_ = 0;
  std::set<const Traffic*> open_;  // still added to
  Counted closed_;                 // sums of destroyed Traffic
  std::map<std::string, std::shared_ptr<Traffic>> operations_;
};

// The messages that each call of a transfer carries on this rank, and the sums over these calls.
class Traffic {
 public:
  // bound: of the plan, in seconds. moved: `rank` is the sender or the receiver of each.
  explicit Traffic(std::string op, double bound = 0, int32_t rank = -1, std::vector<Moved> moved = {});
  ~Traffic();
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  void ended(double seconds, double waited);
  void waited(double seconds);  // for a call that has been counted before
  void failed();
  void again();  // a call was begun again

  bool only_sends() const;
  std::string text() const;  // such as "sends 48 B, receives 0 B", each time

 private:
  friend class Record;

  void add_to(Counted& counted) const;

  const std::string op_;
  const double bound_;
  const int32_t rank_;
  const std::vector<Moved> moved_;
  Record& record_;
  CallSums sums_;  // calls, failed, retries, seconds and waited. Guarded by the record
};

// A private group as the record shows it. within: the process group in which it was made.
struct Members {
  std::string name;
  std::vector<int32_t> ranks;
  std::string within;
};

// One call in the record. It outlives the call, and keeps no tensor alive.
class Flight {
 public:
  // A line of a program. code: the code object of the calling language; offset: of the instruction in the code,
  // if the line is not known yet.
  struct Site {
    std::shared_ptr<void> code;
    int line = 0;
    int offset = -1;
  };
  struct Failure {
    std::string text;
    std::optional<int32_t> peer;
    std::optional<std::string> phase;
  };
  struct Progress {
    std::optional<int32_t> lane;
    std::optional<int64_t> position;  // in the lane
    std::optional<int64_t> run;       // of its plan
    std::shared_ptr<void> facts;      // of its plan, for display
    std::optional<double> seconds;    // from the call to the end of the first wait
    std::optional<Failure> failure;
    std::shared_ptr<Traffic> traffic;  // null until it is known
    std::weak_ptr<Start> call;         // until its first wait, if it may end before that
  };

  // Adds it to the record.
  static std::shared_ptr<Flight> add(std::string op, std::shared_ptr<const Members> group, int32_t rank,
                                     std::shared_ptr<const std::string> what, Site site);
  Flight(Record& record, std::string op, std::shared_ptr<const Members> group, int32_t rank,
         std::shared_ptr<const std::string> what, Site site);

  void counted_as(int32_t lane, int64_t position, std::weak_ptr<Start> call);
  void settled(int64_t run, std::shared_ptr<void> facts, std::shared_ptr<Traffic> traffic);
  // waiting: when the wait for it began, unless that was at once. moved: seconds from the start of the transfer
  // to its end, if known. Returns false if it had ended before.
  bool ended(std::optional<TimePoint> waiting, std::optional<double> moved);
  void ended_unwaited(double moved);  // before any wait for it
  bool failed(Failure failure);       // false if it had failed before
  void failed_unwaited();
  void again();  // it is begun again

  Progress progress() const;

  const std::string op;
  const std::shared_ptr<const Members> group;
  const int32_t rank;
  const std::shared_ptr<const std::string> what;  // is moved, in words that are the same on all ranks
  const Site site;
  const double begun;  // seconds since the epoch
  const TimePoint clock;

 private:
  Traffic& traffic();
  double elapsed() const;

  Record& record_;
  Progress progress_;     // guarded by the record
  bool counted_ = false;  // guarded by the record
};

// A long wait for other ranks, for a line of the log.
struct LongWait {
  int32_t rank = -1;
  std::string call;
  std::string state;           // how far the call has come; may be empty
  std::vector<int32_t> ranks;  // that it waits for; empty: all of them are in the call
  double seconds = 0;
};

// For waits of this process that last for `seconds`: notify() is called by a thread of the executor. 0: never.
void notify_of_long_waits(void (*notify)(const LongWait& wait), double seconds);

// One wait, which is worth one notice. Not thread-safe.
class WaitNotice {
 public:
  explicit WaitNotice(TimePoint begun) : begun_(begun) {}

  bool is_due(TimePoint now) const;  // and has not been posted
  void post(LongWait wait);          // sets its seconds

 private:
  const TimePoint begun_;
  bool posted_ = false;
};

}  // namespace meshcast
