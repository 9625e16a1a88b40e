#include "support/loopback.h"

#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

namespace meshcast {
namespace {

enum class State : uint8_t { Pending, Done, Aborted, Closed };

struct Message {
  int from = -1;
  int to = -1;
  std::byte* data = nullptr;
  int64_t nbytes = 0;
  State state = State::Pending;
};

// All messages of all ranks behind one lock: simple enough to be obviously right.
struct Mailbox {
  using Key = std::tuple<int, int, int32_t>;  // from, to, tag
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::list<std::shared_ptr<Message>>> sends;
  std::map<Key, std::list<std::shared_ptr<Message>>> recvs;
  std::set<int> dead;
};

class LoopbackRequest final : public Request {
 public:
  LoopbackRequest(std::shared_ptr<Mailbox> box, std::shared_ptr<Message> message)
      : box_(std::move(box)), message_(std::move(message)) {}

  ~LoopbackRequest() override { abort(); }

  void wait(TimePoint deadline) override {
    std::unique_lock lock(box_->mutex);
    const bool ended =
        box_->changed.wait_until(lock, deadline, [&] { return message_->state != State::Pending; });
    if (!ended) throw TransportError(TransportError::Cause::Timeout, "timed out");
    if (message_->state == State::Aborted) throw TransportError(TransportError::Cause::Aborted, "aborted");
    if (message_->state == State::Closed) throw TransportError(TransportError::Cause::Closed, "peer is gone");
  }

  void abort() noexcept override {
    const std::lock_guard lock(box_->mutex);
    if (message_->state == State::Pending) message_->state = State::Aborted;
    box_->changed.notify_all();
  }

 private:
  std::shared_ptr<Mailbox> box_;
  std::shared_ptr<Message> message_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Mailbox> box, int rank) : box_(std::move(box)), rank_(rank) {}

  std::unique_ptr<Request> send(int peer, int32_t tag, const void* data, int64_t nbytes) override {
    // The mailbox only reads through a send's pointer.
    return post(rank_, peer, tag, const_cast<std::byte*>(static_cast<const std::byte*>(data)), nbytes, true);
  }

  std::unique_ptr<Request> recv(int peer, int32_t tag, void* data, int64_t nbytes) override {
    return post(peer, rank_, tag, static_cast<std::byte*>(data), nbytes, false);
  }

  const std::shared_ptr<Mailbox>& box() const { return box_; }

 private:
  std::unique_ptr<Request> post(int from, int to, int32_t tag, std::byte* data, int64_t nbytes, bool is_send) {
    auto mine = std::make_shared<Message>(Message{from, to, data, nbytes});
    const std::lock_guard lock(box_->mutex);
    if (box_->dead.count(from) != 0 || box_->dead.count(to) != 0) {
      mine->state = State::Closed;
      return std::make_unique<LoopbackRequest>(box_, mine);
    }
    const Mailbox::Key key{from, to, tag};
    auto& others = (is_send ? box_->recvs : box_->sends)[key];
    while (!others.empty() && others.front()->state != State::Pending) others.pop_front();
    if (others.empty()) {
      (is_send ? box_->sends : box_->recvs)[key].push_back(mine);
      return std::make_unique<LoopbackRequest>(box_, mine);
    }
    const std::shared_ptr<Message> other = others.front();
    others.pop_front();
    const Message& sent = is_send ? *mine : *other;
    const Message& received = is_send ? *other : *mine;
    if (sent.nbytes != received.nbytes) {
      throw std::logic_error("loopback: a message of " + std::to_string(sent.nbytes) +
                             " bytes met a receive of " + std::to_string(received.nbytes));
    }
    if (sent.nbytes > 0) std::memcpy(received.data, sent.data, static_cast<size_t>(sent.nbytes));
    mine->state = State::Done;
    other->state = State::Done;
    box_->changed.notify_all();
    return std::make_unique<LoopbackRequest>(box_, mine);
  }

  std::shared_ptr<Mailbox> box_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_loopback(int world_size) {
  auto box = std::make_shared<Mailbox>();
  std::vector<std::shared_ptr<Transport>> out;
  for (int rank = 0; rank < world_size; ++rank) out.push_back(std::make_shared<LoopbackTransport>(box, rank));
  return out;
}

void kill_loopback_rank(const std::shared_ptr<Transport>& any, int rank) {
  const auto& box = static_cast<const LoopbackTransport&>(*any).box();
  const std::lock_guard lock(box->mutex);
  box->dead.insert(rank);
  for (auto* table : {&box->sends, &box->recvs}) {
    for (auto& [key, messages] : *table) {
      for (auto& message : messages) {
        const bool touches = message->from == rank || message->to == rank;
        if (touches && message->state == State::Pending) message->state = State::Closed;
      }
    }
  }
  box->changed.notify_all();
}

}  // namespace meshcast
