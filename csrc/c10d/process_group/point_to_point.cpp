#include "c10d/process_group/point_to_point.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "transport/memory_message.h"

namespace meshcast {

using c10d::Work;
using Lock = std::unique_lock<std::mutex>;

namespace {

char empty_memory;  // of tensors without elements, which may have none

constexpr uint64_t kHello = uint64_t{1} << 63;  // a key that no tag has

uint64_t key_of(int tag, uint32_t number) {
  return static_cast<uint64_t>(static_cast<uint32_t>(tag)) << 32 | number;
}

}  // namespace

// A message whose end a transport reports. Owners end their transports before they are destroyed, so a
// reference suffices.
class PointToPoint::Ending final : public Message {
 public:
  Ending(PointToPoint& owner, int peer, bool sends, std::shared_ptr<MessageState> state)
      : owner_(owner), peer_(peer), sends_(sends), state_(std::move(state)) {}
  // Messages sent while those of the pair end may have been dropped at the other end.
  void finished() override { state_->end(sends_ ? owner_.error_of_end(peer_, *state_) : nullptr); }
  void failed(int /*peer*/, const TransportError& error) override {
    state_->end(owner_.error_of(error, peer_, *state_));
  }

 private:
  PointToPoint& owner_;
  const int peer_;
  const bool sends_;
  const std::shared_ptr<MessageState> state_;
};

class PointToPoint::Probe final : public Message {
 public:
  Probe(PointToPoint& owner, int peer, int tag) : owner_(owner), peer_(peer), tag_(tag) {}
  void finished() override { owner_.came(peer_, tag_); }
  void failed(int /*peer*/, const TransportError& /*error*/) override { owner_.went(peer_, tag_); }

 private:
  PointToPoint& owner_;
  const int peer_;
  const int tag_;
};

class PointToPoint::Hello final : public Message {
 public:
  Hello(PointToPoint& owner, int peer, bool sends) : owner_(owner), peer_(peer), sends_(sends) {}
  void finished() override {
    if (!sends_) owner_.said_hello(peer_);
  }
  // All others will also fail, with the transport's text.
  void failed(int /*peer*/, const TransportError& /*error*/) override { Hello::finished(); }

 private:
  PointToPoint& owner_;
  const int peer_;
  const bool sends_;
};

void PointToPoint::meet_by(Meet meet) {
  const std::lock_guard lock(mutex_);
  meet_ = std::move(meet);
}

// ---- calls ----

c10::intrusive_ptr<Work> PointToPoint::send(const at::Tensor& tensor, int peer, int tag,
                                            std::chrono::milliseconds limit) {
  return start({true, peer, tag, nullptr, 0, nullptr}, tensor, limit);
}

c10::intrusive_ptr<Work> PointToPoint::recv(const at::Tensor& tensor, int peer, int tag,
                                            std::chrono::milliseconds limit) {
  return start({false, peer, tag, nullptr, 0, nullptr}, tensor, limit);
}

c10::intrusive_ptr<Work> PointToPoint::start(Call call, const at::Tensor& tensor,
                                             std::chrono::milliseconds limit) {
  origin_.check();
  bin_->empty();
  const bool anybody = call.peer == kAnybody;
  call.nbytes = static_cast<int64_t>(tensor.nbytes());
  call.data = call.nbytes > 0 ? tensor.data_ptr() : &empty_memory;
  call.state = std::make_shared<MessageState>(
      MessageLabel{call.sends, ranks_[static_cast<size_t>(rank_)],
                   anybody ? -1 : ranks_[static_cast<size_t>(call.peer)], call.tag, call.nbytes},
      bin_->bag({tensor}));
  if (!anybody) call.state->comes_from(call.peer, ranks_[static_cast<size_t>(call.peer)]);
  const auto op = call.sends ? c10d::OpType::SEND : anybody ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
  const char* title = call.sends ? "meshcast:send" : anybody ? "meshcast:recvAnySource" : "meshcast:recv";
  auto work = c10::make_intrusive<MessageWork>(op, title, tensor, rank_, call.state, shared_from_this(), limit);

  const int peer = call.peer;
  Meet meet;
  {
    const std::lock_guard lock(mutex_);
    // Asked again for each receive from any rank: a rank that listened before may not listen now.
    const bool asks = anybody || !std::exchange(peer_at(peer).asked, true);
    if (asks && !over_) meet = meet_;
    const auto line = lines_.find(call.tag);
    if (over_) {
      call.state->end(over_error(*call.state));
    } else if (anybody && refusal_) {
      call.state->end(refusal_);
    } else if (call.sends || (!anybody && line == lines_.end())) {
      hand_locked(std::move(call));
    } else {
      const int tag = call.tag;
      lines_[tag].waiting.push_back(std::move(call));
      match_locked(tag);
      end_if_alone_locked();
    }
  }
  flush();
  if (meet) meet(peer);
  return work;
}

// ---- matching ----

// A call that waits behind no other.
void PointToPoint::hand_locked(Call call) {
  Peer& peer = peer_at(call.peer);
  if (peer.failure) return call.state->end(peer.failure);
  if (!peer.met) return peer.queue.push_back(std::move(call));
  Stream& stream = peer.streams[call.tag];
  const uint32_t number = call.sends ? stream.sent++ : stream.received++;
  call.state->travels_over(peer.transport);
  moves_.push_back({call.sends ? Move::Kind::Send : Move::Kind::Recv, peer.transport,
                    Envelope{call.peer > rank_ ? 1 : 0, 0, key_of(call.tag, number)}, call.data, call.nbytes,
                    std::make_unique<Ending>(*this, call.peer, call.sends, call.state)});
}

// The next message of `peer` with that tag, which is here, is this call's.
void PointToPoint::take_locked(int peer, Call call) {
  std::erase(lines_[call.tag].here, peer);
  call.peer = peer;
  call.state->comes_from(peer, ranks_[static_cast<size_t>(peer)]);
  hand_locked(std::move(call));
}

// Gives messages that are here to the first receives that match. Receives behind one from any rank wait, and so
// does a receive from a peer whose next message is being probed.
void PointToPoint::match_locked(int tag) {
  Line& line = lines_[tag];
  bool anybody = false;
  for (auto it = line.waiting.begin(); it != line.waiting.end() && !anybody;) {
    const bool here = it->peer == kAnybody
                          ? !line.here.empty()
                          : std::find(line.here.begin(), line.here.end(), it->peer) != line.here.end();
    if (!here && it->peer == kAnybody) {
      anybody = true;
      // A thread that waits for it drives messages: one transport does that for all.
      const auto met =
          std::find_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.transport; });
      if (met != peers_.end()) it->state->travels_over(met->transport);
    } else if (!here && peer_at(it->peer).streams[tag].probed) {
      ++it;
    } else {
      Call call = std::move(*it);
      it = line.waiting.erase(it);
      if (here) {
        const int peer = call.peer == kAnybody ? line.here.front() : call.peer;
        take_locked(peer, std::move(call));
      } else {
        hand_locked(std::move(call));
      }
    }
  }
  if (anybody) {
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) probe_locked(peer, tag);
  } else if (line.waiting.empty() && line.here.empty()) {
    const bool probed = std::any_of(peers_.begin(), peers_.end(), [tag](const Peer& peer) {
      const auto it = peer.streams.find(tag);
      return it != peer.streams.end() && it->second.probed;
    });
    if (!probed) lines_.erase(tag);  // from now on receives go straight on
  }
}

void PointToPoint::probe_locked(int number, int tag) {
  Peer& peer = peer_at(number);
  if (!peer.met || peer.failure || peer.lost) return;
  const auto& here = lines_[tag].here;
  if (std::find(here.begin(), here.end(), number) != here.end()) return;
  Stream& stream = peer.streams[tag];
  if (std::exchange(stream.probed, true)) return;
  moves_.push_back({Move::Kind::Probe, peer.transport,
                    Envelope{number > rank_ ? 1 : 0, 0, key_of(tag, stream.received)}, nullptr, 0,
                    std::make_unique<Probe>(*this, number, tag)});
}

void PointToPoint::came(int peer, int tag) {
  {
    const std::lock_guard lock(mutex_);
    peer_at(peer).streams[tag].probed = false;
    lines_[tag].here.push_back(peer);
    match_locked(tag);
  }
  flush();
}

// A peer of which the next message did not come, and will not.
void PointToPoint::went(int peer, int tag) {
  {
    const std::lock_guard lock(mutex_);
    peer_at(peer).streams[tag].probed = false;
    peer_at(peer).lost = true;
    auto& waiting = lines_[tag].waiting;
    for (auto it = waiting.begin(); it != waiting.end();) {
      if (it->peer != peer) {
        ++it;
        continue;
      }
      Call call = std::move(*it);
      it = waiting.erase(it);
      hand_locked(std::move(call));  // its transport has the error for it
    }
    match_locked(tag);
    end_if_alone_locked();
  }
  flush();
}

// Passes the queued moves to the transports, in order, without the lock: they may report the end of a message
// at once. One thread does it for all, so ends that are reported meanwhile do not pile up on its stack.
void PointToPoint::flush() {
  Lock lock(mutex_);
  if (std::exchange(flushing_, true)) return;
  while (!moves_.empty()) {
    Move move = std::move(moves_.front());
    moves_.pop_front();
    lock.unlock();
    switch (move.kind) {
      case Move::Kind::Send:
        move.transport->send(move.envelope, move.nbytes,
                             std::make_unique<MemoryOut>(move.data, std::move(move.message)));
        break;
      case Move::Kind::Recv:
        move.transport->recv(move.envelope, move.nbytes,
                             std::make_unique<MemoryIn>(move.data, std::move(move.message)));
        break;
      case Move::Kind::Probe: move.transport->probe(move.envelope, std::move(move.message)); break;
    }
    lock.lock();
  }
  flushing_ = false;
}

// ---- peers come and go ----

void PointToPoint::connect(int number, std::shared_ptr<ProbingTransport> transport) {
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peer_at(number);
    if (over_ || peer.failure) return;  // no message waits for it any longer
    peer.transport = std::move(transport);
    for (const bool sends : {false, true}) {
      moves_.push_back({sends ? Move::Kind::Send : Move::Kind::Recv, peer.transport,
                        Envelope{number > rank_ ? 1 : 0, 0, kHello}, &empty_memory, 0,
                        std::make_unique<Hello>(*this, number, sends)});
    }
    for (const Call& call : peer.queue) call.state->travels_over(peer.transport);
  }
  flush();
}

void PointToPoint::said_hello(int number) {
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peer_at(number);
    peer.met = true;
    for (auto& call : std::exchange(peer.queue, {})) hand_locked(std::move(call));
    std::vector<int> tags;
    for (const auto& [tag, line] : lines_) tags.push_back(tag);
    for (const int tag : tags) match_locked(tag);
  }
  flush();
}

void PointToPoint::refuse(int peer, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  if (!refusal_) refusal_ = error;
  leave_locked(peer, error);
  end_from_anybody_locked(error);
}

bool PointToPoint::awaits() const {
  const std::lock_guard lock(mutex_);
  if (over_) return false;
  bool unknown = false;
  for (int number = 0; number < static_cast<int>(peers_.size()); ++number) {
    const Peer& peer = peers_[static_cast<size_t>(number)];
    if (number == rank_ || peer.transport || peer.failure) continue;
    if (!peer.queue.empty()) return true;
    unknown = true;
  }
  return unknown && std::any_of(lines_.begin(), lines_.end(),
                                [](const auto& entry) { return !entry.second.waiting.empty(); });
}

void PointToPoint::check() const {
  const std::lock_guard lock(mutex_);
  if (over_) throw Error(ErrorKind::Aborted, fmt::format("the process group was {}", over_));
}

void PointToPoint::leave_locked(int number, const std::exception_ptr& failure) {
  Peer& peer = peer_at(number);
  if (!peer.failure) peer.failure = failure;
  for (const Call& call : std::exchange(peer.queue, {})) call.state->end(failure);
  for (auto& [tag, line] : lines_) {
    std::erase(line.here, number);
    std::erase_if(line.waiting, [&](const Call& call) {
      if (call.peer == number) call.state->end(failure);
      return call.peer == number;
    });
  }
  end_if_alone_locked();
}

void PointToPoint::end_from_anybody_locked(const std::exception_ptr& error) {
  for (auto& [tag, line] : lines_) {
    std::erase_if(line.waiting, [&](const Call& call) {
      if (call.peer != kAnybody) return false;
      call.state->end(error ? error
                            : std::make_exception_ptr(call.state->problem(
                                  ErrorKind::PeerLost, "all other ranks of the group have exited")));
      return true;
    });
  }
}

// Receives from any rank end when no rank is left.
void PointToPoint::end_if_alone_locked() {
  for (int number = 0; number < static_cast<int>(peers_.size()); ++number) {
    const Peer& peer = peers_[static_cast<size_t>(number)];
    if (number != rank_ && !peer.failure && !peer.lost) return;
  }
  end_from_anybody_locked(nullptr);
}

void PointToPoint::give_up(const std::shared_ptr<MessageState>& state, double limit) {
  std::shared_ptr<Transport> transport;
  {
    const std::lock_guard lock(mutex_);
    const int number = state->source();
    const bool met = number >= 0 && peer_at(number).met;
    const Error late = state->problem(
        ErrorKind::DeadlineExceeded,
        fmt::format("not complete after {:.1f} s; {}", limit,
                    number < 0 ? "no rank sent anything with this tag"
                    : met      ? "that rank has not called the other end of it, is stuck or frozen, or the "
                                 "network is too slow"
                               : "that rank has not sent to this one, nor received from it, in this group"),
        limit);
    state->decide(std::make_exception_ptr(late));
    if (number < 0) {
      for (auto& [tag, line] : lines_) {
        std::erase_if(line.waiting, [&](const Call& call) {
          if (call.state == state) state->end(std::make_exception_ptr(late));
          return call.state == state;
        });
      }
      return;
    }
    transport = peer_at(number).transport;
    ErrorContext context = late.context();
    leave_locked(number, std::make_exception_ptr(Error(
                             ErrorKind::Aborted,
                             fmt::format("{} (all messages between these two ranks ended then; destroy the "
                                         "process group and make a new one)",
                                         late.what()),
                             context)));
  }
  if (transport) transport->abort();
}

// ---- the end ----

std::exception_ptr PointToPoint::over_error(const MessageState& state) const {
  return std::make_exception_ptr(
      state.problem(ErrorKind::Aborted, fmt::format("the process group was {}; make a new one", over_)));
}

std::exception_ptr PointToPoint::error_of_end(int peer, const MessageState& state) const {
  const std::lock_guard lock(mutex_);
  const auto& failure = peers_[static_cast<size_t>(peer)].failure;
  if (failure) return failure;
  return over_ ? over_error(state) : nullptr;
}

std::exception_ptr PointToPoint::error_of(const TransportError& error, int peer, const MessageState& state) {
  if (error.cause() == TransportError::Cause::Mismatch)
    return std::make_exception_ptr(state.problem(
        ErrorKind::PlanMismatch, fmt::format("{}; both ends need tensors of one size", error.what())));
  if (error.cause() == TransportError::Cause::Aborted) {
    if (auto ended = error_of_end(peer, state)) return ended;
  }
  return std::make_exception_ptr(
      state.problem(ErrorKind::PeerLost,
                    fmt::format("that rank is lost: {}. Look at that rank's own output first.", error.what())));
}

std::vector<std::shared_ptr<ProbingTransport>> PointToPoint::end_locked(const char* how) {
  if (!over_) over_ = how;
  meet_ = nullptr;
  std::vector<std::shared_ptr<ProbingTransport>> transports;
  for (Peer& peer : peers_) {
    if (peer.transport) transports.push_back(peer.transport);
    for (const Call& call : std::exchange(peer.queue, {})) call.state->end(over_error(*call.state));
  }
  for (auto& [tag, line] : lines_) {
    for (const Call& call : std::exchange(line.waiting, {})) call.state->end(over_error(*call.state));
  }
  return transports;
}

void PointToPoint::abort() {
  if (origin_.foreign()) return;
  std::vector<std::shared_ptr<ProbingTransport>> transports;
  Meet meet;  // dropped without the lock
  {
    const std::lock_guard lock(mutex_);
    meet = meet_;
    transports = end_locked("aborted");
  }
  for (const auto& transport : transports) transport->abort();
}

void PointToPoint::shutdown() {
  if (origin_.foreign()) return;
  std::vector<std::shared_ptr<ProbingTransport>> transports;
  Meet meet;
  {
    const std::lock_guard lock(mutex_);
    meet = meet_;
    transports = end_locked("shut down");
  }
  for (const auto& transport : transports) transport->abort();  // all of them, before any is waited for
  for (const auto& transport : transports) transport->shutdown();
  const std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) peer.transport.reset();
}

}  // namespace meshcast
