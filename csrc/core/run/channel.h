#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "common/sync.h"
#include "plan/staging.h"
#include "run/run.h"
#include "transport/transport.h"

namespace meshcast {

// Messages that a channel keeps posted at a time. Both ends of a pair use the same number: a sender never
// issues a message whose receive is not within the receiver's window, so no slot waits for a message that
// can only be posted after it.
inline constexpr size_t kWindow = kMessageWindow;

// Called by a thread of a transport when a message failed.
using ChannelFailure =
    std::function<void(int peer, const TransportError& error, const std::shared_ptr<Run>& run)>;

// Runs a step of a run on a thread of a transport, or on the work thread, where no caller could catch an
// exception. Without memory the run fails, as if the message had; the rest of the step is not done.
template <typename Step>
void guarded(const ChannelFailure& failure, int peer, const std::shared_ptr<Run>& run,
             const Step& step) noexcept {
  try {
    step();
  } catch (const std::bad_alloc&) {
    try {
      failure(peer, TransportError(TransportError::Cause::Memory, "no memory for a message"), run);
    } catch (const std::bad_alloc&) {
      // No memory even for the error: the run ends at its deadline.
    }
  }
}

// Everything that comes from one peer in one lane, in start order of the runs and plan order within a run. A
// receive depends only on its sender: data is put into place as it arrives, and forwards are read from there,
// so receiving never waits for sending and no cycle of full buffers can form. Needs no thread: the transport
// reports arrivals.
class InChannel {
 public:
  using Arrived = std::function<void(const std::shared_ptr<Run>& run, const RecvOp& op)>;

  InChannel(std::shared_ptr<Transport> transport, int peer, int32_t lane, Arrived arrived,
            ChannelFailure failure);

  // ops: indices into the receives of its program. Posts nothing yet.
  void enqueue(const std::shared_ptr<Run>& run, const std::vector<int32_t>& ops);
  void resume();  // posts what the window, PlanOrder and Carries allow by now
  void close();   // posts nothing more; the transport ends what is posted

 private:
  class Receipt;
  struct Entry {
    std::shared_ptr<Run> run;
    const RecvOp* op = nullptr;
  };

  bool may_post_locked() const;
  std::vector<std::byte> staging_for_locked(const Entry& entry);
  void arrived(Receipt& receipt);
  void give_back(std::vector<std::byte> staging);

  const std::shared_ptr<Transport> transport_;
  const int peer_;
  const int32_t lane_;
  const Arrived arrived_;
  const ChannelFailure failure_;

  Mutex mutex_;
  std::deque<Entry> entries_;  // not posted yet
  int64_t first_ = 0;          // position of entries_.front(), see message_key
  size_t posted_ = 0;
  bool posting_ = false;                      // a thread is in resume(), and looks again before it leaves
  std::vector<std::vector<std::byte>> pool_;  // staging of partial values to reuse, at most kWindow
  bool closed_ = false;
};

// Everything that goes to one peer in one lane. A message is issued as soon as its data is there and the window
// and its PlanOrder permit, by the thread that learns of it first.
class OutChannel {
 public:
  OutChannel(std::shared_ptr<Transport> transport, int peer, int32_t lane, ChannelFailure failure);

  // ops: indices into the sends of its program. Returns the position of the first, see message_key; the others
  // follow in order.
  int64_t enqueue(const std::shared_ptr<Run>& run, const std::vector<int32_t>& ops);
  void mark_ready(int64_t position);
  // Issues what may be issued. between: called after each message, without any lock.
  void pump(const std::function<void()>& between = {});
  void close();  // issues nothing more

 private:
  class Dispatch;
  enum class State : uint8_t { Waiting, Ready, Issued, Sent };
  struct Entry {
    std::shared_ptr<Run> run;
    const SendOp* op = nullptr;
    State state = State::Waiting;
  };

  Entry* next_locked(int64_t* position);
  void sent(Dispatch& dispatch);

  const std::shared_ptr<Transport> transport_;
  const int peer_;
  const int32_t lane_;
  const ChannelFailure failure_;

  Mutex mutex_;
  std::deque<Entry> entries_;
  int64_t first_ = 0;     // position of entries_.front()
  bool pumping_ = false;  // a thread is in pump(), and looks again before it leaves
  bool closed_ = false;
};

}  // namespace meshcast
