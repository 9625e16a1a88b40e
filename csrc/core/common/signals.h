#pragma once

#include <algorithm>
#include <chrono>

#include "common/sync.h"

namespace meshcast {

// The calling language runs handlers of signals between its own instructions, and a thread that waits in this
// code executes none. So a wait looks for signals from time to time.

// The longest part of a wait without a look. Short calls end before that.
inline constexpr std::chrono::milliseconds kSignalSlice{100};

// `look`: runs the handlers of pending signals, if the calling thread is the one that may; throws what they
// raise.
void look_for_signals_by(void (*look)());
void look_for_signals();

// wait_until(slice): waits until then at most, and returns whether it has what it waits for. Returns false at
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

// From now on the signal is also counted by the descriptor of `count_signals_by`. The program's handler for it
// runs as before, and one that it installs later replaces ours; the default action is no longer taken. Returns
// false if the program ignores the signal, which then stays ignored.
bool also_catch(int number);
// An eventfd of this process; -1: none. A forked child inherits that of its parent, and must set its own.
void count_signals_by(int eventfd);

}  // namespace meshcast
