#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "common/sync.h"
#include "run/channel.h"
#include "run/run.h"
#include "transport/local_transport.h"

namespace meshcast {

// Messages that a local channel keeps posted at a time: enough for a sender always to find one.
inline constexpr size_t kLocalWindow = 16;

// Everything that comes from one peer of this host in one lane, posted in start order of the runs and plan
// order within a run, a window at a time. Needs no thread: the transport reports arrivals. The first message in
// plan order of all in flight has been posted by every receiver, and its sender has its data; so something can
// always move.
class LocalInChannel {
 public:
  using Arrived = std::function<void(const std::shared_ptr<Run>& run, const RecvOp& op)>;

  LocalInChannel(std::shared_ptr<LocalTransport> transport, int peer, Arrived arrived, ChannelFailure failure);

  void enqueue(const std::shared_ptr<Run>& run, const std::vector<int32_t>& ops);
  void resume();  // posts what Carries allows by now
  void close();   // posts nothing more; the transport ends what is posted

 private:
  class Receipt;
  struct Entry {
    std::shared_ptr<Run> run;
    const RecvOp* op = nullptr;
  };

  void post_locked();
  void arrived(const std::shared_ptr<Run>& run, const RecvOp& op);
  std::vector<std::byte> take_staging(int64_t nbytes);  // for a partial value that is assembled
  void give_back(std::vector<std::byte> staging);

  const std::shared_ptr<LocalTransport> transport_;
  const int peer_;
  const Arrived arrived_;
  const ChannelFailure failure_;
  Mutex mutex_;
  std::deque<Entry> entries_;  // not posted yet
  int64_t first_ = 0;          // position of entries_.front(), see message_key
  size_t posted_ = 0;
  std::vector<std::vector<std::byte>> pool_;  // staging to reuse, at most kWindow
  bool closed_ = false;
};

// Sends one message to all its receivers on this host. Its data must be there.
void send_local(LocalTransport& transport, const std::shared_ptr<Run>& run, const SendOp& op,
                const ChannelFailure& failure);

}  // namespace meshcast
