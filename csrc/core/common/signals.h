#pragma once

#include <algorithm>
#include <chrono>

#include "common/sync.h"

namespace meshcast {

// The language that calls this code runs handlers of signals between its own instructions, of which a thread
// that waits in here has none. So a wait looks for them now and then.

// How long a wait goes on without a look. Short calls never get that far.
inline constexpr std::chrono::milliseconds kSignalSlice{100};

// `look`: runs the handlers of pending signals, where the calling thread is the one that may; throws what they
// raise.
void look_for_signals_by(void (*look)());
void look_for_signals();

// wait_until(slice): waits until then at most, and answers whether it has what it waits for. False past
// `limit`.
template <typename Wait>
bool wait_in_slices(TimePoint limit, const Wait& wait_until) {
  for (;;) {
    const auto slice = std::min<TimePoint>(limit, Clock::now() + kSignalSlice);
    if (wait_until(slice)) return true;
    look_for_signals();
    if (slice == limit) return false;
  }
}

// From now on the signal is also counted by the descriptor that `count_signals_by` names. A handler that the
// program has for it runs as before, and one that it installs later takes the place of ours; the default action
// is taken no longer. False where the program ignores the signal: then it stays ignored.
bool also_catch(int number);
// An eventfd of this process; -1: none. A forked child inherits that of its parent, and is to name its own.
void count_signals_by(int eventfd);

}  // namespace meshcast
