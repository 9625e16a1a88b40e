#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "c10d/process_group/message_work.h"
#include "common/forks.h"
#include "transport/transport.h"

namespace meshcast {

// The point-to-point messages of one group on the CPU: send, recv, and recv from any rank. Each pair of ranks
// has a transport of its own, from their meeting on, so that the end of one pair does not affect the others.
// Messages of a sender with one tag match in the order of the calls: their keys number them. Receives from any
// rank match in the order in which messages come; receives of that tag that are called later wait behind them.
// Before anything else each end says hello: messages to a rank that has not met the other yet are kept only
// within limits. Ranks are those of the group. Thread-safe; no call waits.
class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  static constexpr int kAnybody = -1;
  // Asks for the meeting with a rank, or with any that sends something. Must not wait. connect() or refuse()
  // follows.
  using Meet = std::function<void(int peer)>;

  // ranks: the global ones, by rank in the group.
  PointToPoint(std::vector<int32_t> ranks, int rank)
      : ranks_(std::move(ranks)), rank_(rank), peers_(ranks_.size()) {}
  ~PointToPoint() { shutdown(); }

  void meet_by(Meet meet);

  // tensor: contiguous, on the CPU. limit: see MessageWork.
  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& tensor, int peer, int tag,
                                      std::chrono::milliseconds limit);
  c10::intrusive_ptr<c10d::Work> recv(const at::Tensor& tensor, int peer, int tag,
                                      std::chrono::milliseconds limit);

  // The two have met: `transport` is between rank 0, the lower of them, and rank 1.
  void connect(int peer, std::shared_ptr<ProbingTransport> transport);
  // Nothing can be exchanged with this rank.
  void refuse(int peer, std::exception_ptr error);
  // True if a call waits for a rank that has not been met.
  bool awaits() const;
  // Throws Aborted where the group has ended: no meeting is needed any longer.
  void check() const;

  // Ends a message that took too long, by its limit in seconds; and all others with that peer, unless it is a
  // receive from any rank that has no message yet.
  void give_up(const std::shared_ptr<MessageState>& state, double limit);

  // Ends all messages, now and later; shutdown() also waits until none is left.
  void abort();
  void shutdown();

 private:
  class Ending;
  class Probe;
  class Hello;
  struct Call {
    bool sends = false;
    int peer = kAnybody;
    int tag = 0;
    void* data = nullptr;
    int64_t nbytes = 0;
    std::shared_ptr<MessageState> state;
  };
  // A request to a transport, made once the lock is released.
  struct Move {
    enum class Kind : uint8_t { Send, Recv, Probe } kind;
    std::shared_ptr<ProbingTransport> transport;
    Envelope envelope;
    void* data;
    int64_t nbytes;
    std::unique_ptr<Message> message;
  };
  // The messages with one peer and tag, counted in each direction.
  struct Stream {
    uint32_t sent = 0;
    uint32_t received = 0;
    bool probed = false;  // a probe for the next one is under way
  };
  struct Peer {
    std::shared_ptr<ProbingTransport> transport;  // null until this end has met the other
    bool met = false;                             // both ends have: the other has said so
    std::exception_ptr failure;                   // why nothing is exchanged with it any longer
    bool asked = false;                           // for the meeting
    bool lost = false;                            // nothing more comes from it
    std::deque<Call> queue;                       // in the order of the calls, until they have met
    std::unordered_map<int, Stream> streams;      // by tag
  };
  // The receives of one tag that are, or were, behind one from any rank, and the peers whose message has come
  // without a receive.
  struct Line {
    std::deque<Call> waiting;
    std::deque<int> here;
  };

  c10::intrusive_ptr<c10d::Work> start(Call call, const at::Tensor& tensor, std::chrono::milliseconds limit);
  Peer& peer_at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  void hand_locked(Call call);
  void take_locked(int peer, Call call);
  void match_locked(int tag);
  void probe_locked(int peer, int tag);
  void end_from_anybody_locked(const std::exception_ptr& error);
  void end_if_alone_locked();
  void leave_locked(int peer, const std::exception_ptr& failure);
  void said_hello(int peer);
  void came(int peer, int tag);
  void went(int peer, int tag);
  std::exception_ptr error_of(const TransportError& error, int peer, const MessageState& state);
  std::exception_ptr error_of_end(int peer, const MessageState& state) const;  // null while the pair is usable
  std::exception_ptr over_error(const MessageState& state) const;
  std::vector<std::shared_ptr<ProbingTransport>> end_locked(const char* how);
  void flush();

  const Origin origin_;
  const std::vector<int32_t> ranks_;
  const int rank_;
  const std::shared_ptr<RecycleBin> bin_ = std::make_shared<RecycleBin>();

  mutable std::mutex mutex_;
  Meet meet_;
  std::vector<Peer> peers_;
  std::unordered_map<int, Line> lines_;  // by tag
  std::exception_ptr refusal_;           // the first rank that nothing can be exchanged with, if any
  std::deque<Move> moves_;               // in order
  bool flushing_ = false;                // a thread is handing them out
  const char* over_ = nullptr;           // how the group was ended, if it was
};

}  // namespace meshcast
