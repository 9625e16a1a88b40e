#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/sync.h"
#include "run/admission.h"
#include "run/channel.h"
#include "run/local_channel.h"
#include "run/run.h"
#include "run/work_thread.h"
#include "transport/transport.h"

namespace meshcast {

// Executes programs of one private group. start() only enqueues, and does what is small. The threads of the
// transports, which report completed receives and sends, and the work thread, which copies, do the rest. Runs
// interleave freely: each has its own messages, and a lane never waits for another.
class Engine {
 public:
  // `failure` is called for every transport error, from a thread of the transport. It decides what the error
  // means and calls fail(); until then the affected runs are blocked. `local` carries the messages that
  // programs mark as local; without it they must have none.
  Engine(std::shared_ptr<Transport> transport, ChannelFailure failure,
         std::shared_ptr<LocalTransport> local = nullptr);
  ~Engine();

  // Throws what fail() was given if the engine has failed. Fails the engine if it cannot start all of the run
  // (no more threads, no memory): the ranks would no longer agree on what has been sent.
  std::shared_ptr<Run> start(std::shared_ptr<const Program> program, Buffers buffers, RunLabel label,
                             TimePoint deadline);

  // Ends every run in flight with `error` and refuses new ones. The first call counts. Any thread.
  void fail(std::exception_ptr error);

  std::exception_ptr error() const;
  std::vector<std::shared_ptr<Run>> in_flight();

  // Looks for peers of this host that have exited. Must be called from time to time while runs are in flight.
  void check_local_peers();

  // fail() with `error` if runs are left, then joins all threads. Must not be called from a thread of the
  // engine.
  void shutdown(std::exception_ptr error);

 private:
  using ChannelKey = std::pair<int32_t, int>;  // lane, peer

  void hand_out(const std::shared_ptr<Run>& run);
  InChannel& in_channel_locked(ChannelKey key);
  OutChannel& out_channel_locked(ChannelKey key);
  LocalInChannel& local_channel_locked(ChannelKey key);
  void forward(const std::shared_ptr<Run>& run, const RecvOp& op);
  void forget_ended_runs_locked();

  const std::shared_ptr<Transport> transport_;
  const ChannelFailure failure_;

  mutable Mutex mutex_;
  std::shared_ptr<LocalTransport> local_;  // dropped by shutdown(), since it holds memory
  std::map<ChannelKey, std::unique_ptr<InChannel>> in_;
  std::map<ChannelKey, std::unique_ptr<OutChannel>> out_;
  std::map<ChannelKey, std::unique_ptr<LocalInChannel>> local_in_;
  std::map<ChannelKey, int64_t> local_sent_;  // messages to each peer of this host, over all runs
  std::vector<std::weak_ptr<Run>> runs_;
  size_t look_at_runs_ = 16;  // ended runs are removed when there are more
  std::exception_ptr error_;
  bool closed_ = false;
  Admission admission_;  // of users' threads that start runs

  const std::shared_ptr<WorkThread> work_;
};

}  // namespace meshcast
