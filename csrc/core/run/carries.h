#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/sync.h"
#include "run/program.h"

namespace meshcast {

// The buffers of a run for values that it only passes on: outcomes of reductions that go on to others. They are
// bounded, so here, other than elsewhere, receiving waits for sending, and a cycle of full buffers has to be
// ruled out. The receives that need one are numbered in plan order; number n may be posted as soon as fewer
// than `most` of the n before it are still held. With most > M, where M is what this rank would hold at most if
// all hops were done one after the other in plan order, nothing stands still, whatever the chains and their
// order:
//
//   Take the first hop in plan order that is missing anywhere (of the first run of its lane that misses any;
//   all ranks start the runs of a lane in one order). All hops before it are through. So its sender has its
//   data, and at both ends it is next in its channel, as channels keep plan order. If its outcome needs a
//   buffer, then of the earlier numbers only those are held of which a send comes later in the plan: fewer than
//   M, since this hop would make them M at most. Ends of sends are noticed without waiting for anything, so it
//   will be posted. PlanOrder lets it be posted by the same argument, and shared memory drains what is posted.
//
// Lanes share neither channels nor buffers. A window beyond M lets the next receives be posted meanwhile.
// Thread-safe; calls nobody, so it may be used under any lock.
class Carries {
 public:
  explicit Carries(const Program& program);

  // Whether the number-th receive of those that carry may be posted. Once true it stays true.
  bool may_take(int32_t number) const;

  // A buffer for such a receive, and what it holds once it has been filled.
  std::vector<std::byte> take(int64_t nbytes);
  void keep(int32_t number, std::vector<std::byte> value);
  std::byte* data(int32_t number);

  // One of its sends is through. Returns whether others may now be posted that could not before.
  bool sent(int32_t number);

  int32_t peak() const;  // the most buffers that were in use at a time

 private:
  const int32_t most_;
  mutable Mutex mutex_;
  std::vector<int32_t> sends_left_;
  std::vector<std::vector<std::byte>> kept_;
  std::vector<std::vector<std::byte>> spare_;  // buffers to reuse; they go with the run
  int32_t released_ = 0;                       // numbers whose sends are all through
  int32_t in_use_ = 0;
  int32_t peak_ = 0;
};

}  // namespace meshcast
