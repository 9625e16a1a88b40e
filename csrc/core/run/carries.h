#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/sync.h"
#include "run/program.h"

namespace meshcast {

// The buffers of a run for values that it only passes on: outcomes of reductions that it forwards. Their number
// is bounded, so only here does receiving wait for sending, and a cycle of full buffers has to be ruled out.
// The receives that need one are numbered in plan order; number n may be posted as soon as fewer than `most` of
// the n before it are still held. With most > M, where M is the most that this rank would hold if all hops were
// done one after the other in plan order, there is no deadlock, for any chains in any order:
//
//   Take the first hop in plan order that is not complete (in the first run of its lane with such a hop; all
//   ranks start the runs of a lane in one order). All hops before it are complete. So its sender has its data,
//   and at both ends it is next in its channel, as channels keep plan order. If its outcome needs a buffer, the
//   earlier numbers still held are those with a send later in the plan: fewer than M, since this hop would make
//   them M at most. Ends of sends are noticed without waiting for anything, so the hop will be posted. By the
//   same argument PlanOrder lets it be posted, and shared memory drains what is posted.
//
// Lanes share neither channels nor buffers. A window beyond M lets the next receives be posted meanwhile.
// Thread-safe; calls no other code, so it may be used under any lock.
class Carries {
 public:
  explicit Carries(const Program& program);

  // Whether the number-th receive of those that carry may be posted. Once true, it stays true.
  bool may_take(int32_t number) const;

  // take(): a buffer for such a receive. keep() and data(): its contents, once it has been filled.
  std::vector<std::byte> take(int64_t nbytes);
  void keep(int32_t number, std::vector<std::byte> value);
  std::byte* data(int32_t number);

  // One of its sends is complete. Returns whether more receives may now be posted than before.
  bool sent(int32_t number);

  int32_t peak() const;  // the most buffers that were in use at a time

 private:
  const int32_t most_;
  mutable Mutex mutex_;
  std::vector<int32_t> sends_left_;
  std::vector<std::vector<std::byte>> kept_;
  std::vector<std::vector<std::byte>> spare_;  // buffers to reuse; freed with the run
  int32_t released_ = 0;                       // numbers whose sends are all complete
  int32_t in_use_ = 0;
  int32_t peak_ = 0;
};

}  // namespace meshcast
