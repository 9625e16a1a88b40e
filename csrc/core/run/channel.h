#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "plan/staging.h"
#include "run/run.h"
#include "transport/transport.h"

namespace meshcast {

// Messages that a channel keeps posted at a time. Both ends of a pair use the same number: a sender never
// issues a message whose receive is not within the receiver's window, so no slot waits for a message that
// can only be posted after it.
inline constexpr size_t kWindow = kMessageWindow;

// Deadlines are the watcher's business, which knows the first cause; a wait lasts this much longer so that
// it is never the transport that tears the group down at the deadline.
inline constexpr auto kWaitSlack = std::chrono::seconds(10);

// Called by a channel's thread when a request failed; the channel then stops.
using ChannelFailure =
    std::function<void(int peer, const TransportError& error, const std::shared_ptr<Run>& run)>;

// Waiting for the front message and putting it where it belongs is one thread's work at a time: that of the
// channel's own, or of a user's that waits for the front message's run anyway (Run::drive). `driven` says that
// such a user is about to come, so that the channel's thread need not be woken; should nobody come, wake()
// does.

// Everything that comes from one peer in one lane, in start order of the runs and plan order within a run.
// A receive depends on nothing but its sender: what arrives is put into place at once and forwards are read
// from there, so receiving never waits for sending and no cycle of full buffers can form.
class InChannel {
 public:
  using Arrived = std::function<void(const std::shared_ptr<Run>& run, const RecvOp& op)>;

  InChannel(std::shared_ptr<Transport> transport, int peer, Arrived arrived, ChannelFailure failure);
  ~InChannel();

  void enqueue(const std::shared_ptr<Run>& run, const std::vector<const RecvOp*>& ops, bool driven);
  void drive(const Run& run) noexcept;
  void wake();
  void resume();  // posts what PlanOrder allows by now
  void close();   // aborts what is posted and drops the rest; any thread, idempotent, does not wait
  void join();    // after close(): waits for the channel's thread

 private:
  struct Entry {
    std::shared_ptr<Run> run;
    const RecvOp* op = nullptr;
    std::unique_ptr<Request> request;  // null: not posted yet
    std::vector<std::byte> staging;    // empty: straight into the destination
  };

  void post_locked();
  void loop();
  void take_front(std::unique_lock<std::mutex>& lock);
  void drop(std::deque<Entry> entries);

  const std::shared_ptr<Transport> transport_;
  const int peer_;
  const Arrived arrived_;
  const ChannelFailure failure_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;  // the first posted_ are posted
  size_t posted_ = 0;
  int64_t first_ = 0;                         // position of entries_.front(), see message_tag
  std::vector<std::vector<std::byte>> pool_;  // staging buffers to reuse, at most kWindow
  bool taking_ = false;                       // a thread is in take_front()
  bool failed_ = false;                       // a request has failed: nothing is waited for any more
  bool closed_ = false;
  std::thread thread_;
};

// Everything that goes to one peer in one lane. A message is issued as soon as its data is there and it is
// within the window and its PlanOrder, by whichever thread learns of it first. The channel's own thread waits
// for the front message, and issues what no other thread has.
class OutChannel {
 public:
  OutChannel(std::shared_ptr<Transport> transport, int peer, ChannelFailure failure);
  ~OutChannel();

  // Returns the position of the first op, see message_tag; the others follow in order.
  int64_t enqueue(const std::shared_ptr<Run>& run, const std::vector<const SendOp*>& ops, bool driven);
  void mark_ready(int64_t position);
  void pump(bool driven = false);  // issues what may be issued
  void drive(const Run& run) noexcept;
  void wake();
  void close();
  void join();

 private:
  enum class State : uint8_t { Waiting, Ready, Packing, Issued };
  struct Entry {
    std::shared_ptr<Run> run;
    const SendOp* op = nullptr;
    State state = State::Waiting;
    std::unique_ptr<Request> request;
    std::vector<std::byte> staging;
  };

  static bool may_issue(const Entry& entry);
  bool any_ready_locked() const;
  bool front_issued_locked() const { return !entries_.empty() && entries_.front().state == State::Issued; }
  void loop();
  void take_front(std::unique_lock<std::mutex>& lock);
  void drop(std::deque<Entry> entries);

  const std::shared_ptr<Transport> transport_;
  const int peer_;
  const ChannelFailure failure_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  int64_t first_ = 0;  // position of entries_.front()
  std::vector<std::vector<std::byte>> pool_;
  bool taking_ = false;
  bool failed_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace meshcast
