#pragma once

#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace meshcast {

// Names a run towards the other ranks and in messages.
struct RunLabel {
  int32_t slot = 0;      // agreed number of the plan in the group
  bool reverse = false;  // backward direction of the same call
  int32_t lane = 0;
  int64_t ordinal = 0;     // number of the call in the lane, those that a rank refused included
  std::string descriptor;  // what the ranks agreed on, in words
  std::string op;
};

// A run as whoever watches over deadlines sees it, wherever its tensors are. Thread-safe.
class WatchedRun {
 public:
  virtual ~WatchedRun() = default;

  virtual const RunLabel& label() const = 0;
  virtual TimePoint started() const = 0;
  virtual TimePoint deadline() const = 0;
  virtual double seconds() const = 0;  // start to end, or to now
  virtual bool ended() const = 0;
  virtual int64_t received_bytes() const = 0;
  virtual int64_t expected_bytes() const = 0;
  virtual void force_end() = 0;  // after a failure: waits for nothing that still touches the tensors
};

}  // namespace meshcast
