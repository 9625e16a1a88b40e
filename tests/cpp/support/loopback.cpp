#include "support/loopback.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

namespace meshcast {
namespace {

const TransportError kAborted(TransportError::Cause::Aborted, "aborted");
const TransportError kGone(TransportError::Cause::Closed, "peer is gone");

constexpr int64_t kPiece = 61;  // bytes: pieces of messages cut elements

struct Pending {
  int64_t nbytes = 0;
  std::unique_ptr<Outgoing> out;  // of a send
  std::unique_ptr<Incoming> in;   // of a receive

  std::unique_ptr<Message> message() { return out ? std::unique_ptr<Message>(std::move(out)) : std::move(in); }
};

template <typename Kind>
class WithEnd : public Kind {
 public:
  WithEnd(std::unique_ptr<Kind> inner, OnEnd on_end) : inner_(std::move(inner)), on_end_(std::move(on_end)) {}

  auto packed() -> decltype(std::declval<Kind>().packed()) override { return inner_->packed(); }
  void finished() override {
    on_end_([message = inner_] { message->finished(); });
  }
  void failed(int peer, const TransportError& error) override {
    on_end_([message = inner_, peer, error] { message->failed(peer, error); });
  }

 protected:
  const std::shared_ptr<Kind> inner_;
  const OnEnd on_end_;
};

class OutgoingWithEnd final : public WithEnd<Outgoing> {
 public:
  using WithEnd::WithEnd;
  void read(int64_t offset, int64_t nbytes, std::byte* out) override { inner_->read(offset, nbytes, out); }
};

class IncomingWithEnd final : public WithEnd<Incoming> {
 public:
  using WithEnd::WithEnd;
  void write(int64_t offset, int64_t nbytes, const std::byte* in) override {
    inner_->write(offset, nbytes, in);
  }
};

class LoopbackTransport;

// All messages of all ranks behind one lock: simple enough to be obviously right.
struct Mailbox {
  using Key = std::tuple<int, int, uint64_t>;  // from, to, key
  std::mutex mutex;
  std::map<Key, std::deque<Pending>> sends;
  std::map<Key, std::deque<Pending>> recvs;
  std::set<int> dead;
  std::vector<LoopbackTransport*> ranks;  // null: shut down
};

// A thread of each rank tells how its messages ended.
class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Mailbox> box, int rank) : box_(std::move(box)), rank_(rank) {
    teller_ = std::thread([this] { tell(); });
  }
  ~LoopbackTransport() override { LoopbackTransport::shutdown(); }

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    post({rank_, to.peer, to.key}, {nbytes, std::move(message), nullptr}, true);
  }

  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    post({from.peer, rank_, from.key}, {nbytes, nullptr, std::move(message)}, false);
  }

  void abort() noexcept override {
    const std::lock_guard lock(box_->mutex);
    aborted_ = true;
    fail_locked([this](const Mailbox::Key& key, bool is_send) { return owner(key, is_send) == rank_; },
                kAborted);
  }

  void shutdown() override {
    abort();
    {
      const std::lock_guard lock(box_->mutex);
      closed_ = true;
      changed_.notify_all();
    }
    if (teller_.joinable()) teller_.join();
    const std::lock_guard lock(box_->mutex);
    box_->ranks[static_cast<size_t>(rank_)] = nullptr;
  }

  void kill(int rank) {
    const std::lock_guard lock(box_->mutex);
    box_->dead.insert(rank);
    fail_locked(
        [rank](const Mailbox::Key& key, bool) { return std::get<0>(key) == rank || std::get<1>(key) == rank; },
        kGone);
  }

 private:
  static int owner(const Mailbox::Key& key, bool is_send) {
    return is_send ? std::get<0>(key) : std::get<1>(key);
  }

  void post(const Mailbox::Key& key, Pending mine, bool is_send) {
    const int peer = owner(key, !is_send);
    std::unique_lock lock(box_->mutex);
    if (aborted_) {
      lock.unlock();
      mine.message()->failed(peer, kAborted);
      return;
    }
    if (box_->dead.count(rank_) != 0 || box_->dead.count(peer) != 0) {
      told_locked(mine.message(), peer, &kGone);
      return;
    }
    auto& others = (is_send ? box_->recvs : box_->sends)[key];
    if (others.empty()) {
      (is_send ? box_->sends : box_->recvs)[key].push_back(std::move(mine));
      return;
    }
    Pending other = std::move(others.front());
    others.pop_front();
    Pending& sent = is_send ? mine : other;
    Pending& received = is_send ? other : mine;
    if (sent.nbytes != received.nbytes) {
      throw std::logic_error("loopback: a message of " + std::to_string(sent.nbytes) +
                             " bytes met a receive of " + std::to_string(received.nbytes));
    }
    std::array<std::byte, kPiece> piece{};
    for (int64_t at = 0; at < sent.nbytes; at += kPiece) {
      const int64_t nbytes = std::min(kPiece, sent.nbytes - at);
      sent.out->read(at, nbytes, piece.data());
      received.in->write(at, nbytes, piece.data());
    }
    told_locked(mine.message(), peer, nullptr);
    box_->ranks[static_cast<size_t>(peer)]->told_locked(other.message(), rank_, nullptr);
  }

  template <typename Concerns>
  void fail_locked(const Concerns& concerns, const TransportError& error) {
    for (const bool is_send : {true, false}) {
      for (auto& [key, waiting] : is_send ? box_->sends : box_->recvs) {
        if (!concerns(key, is_send)) continue;
        LoopbackTransport* rank = box_->ranks[static_cast<size_t>(owner(key, is_send))];
        for (Pending& each : waiting) rank->told_locked(each.message(), owner(key, !is_send), &error);
        waiting.clear();
      }
    }
  }

  // error: null where the message is through.
  void told_locked(std::unique_ptr<Message> message, int peer, const TransportError* error) {
    ended_.push_back({std::move(message), peer, error});
    changed_.notify_all();
  }

  void tell() {
    std::unique_lock lock(box_->mutex);
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !ended_.empty(); });
      if (ended_.empty()) return;
      Ended next = std::move(ended_.front());
      ended_.pop_front();
      lock.unlock();
      if (next.error) {
        next.message->failed(next.peer, *next.error);
      } else {
        next.message->finished();
      }
      next.message.reset();
      lock.lock();
    }
  }

  struct Ended {
    std::unique_ptr<Message> message;
    int peer = -1;
    const TransportError* error = nullptr;
  };

  const std::shared_ptr<Mailbox> box_;
  const int rank_;
  std::condition_variable changed_;
  std::deque<Ended> ended_;  // guarded by the mailbox, as is the rest
  bool aborted_ = false;
  bool closed_ = false;
  std::thread teller_;
};

}  // namespace

std::unique_ptr<Outgoing> with_end(std::unique_ptr<Outgoing> message, OnEnd on_end) {
  return std::make_unique<OutgoingWithEnd>(std::move(message), std::move(on_end));
}

std::unique_ptr<Incoming> with_end(std::unique_ptr<Incoming> message, OnEnd on_end) {
  return std::make_unique<IncomingWithEnd>(std::move(message), std::move(on_end));
}

std::vector<std::shared_ptr<Transport>> make_loopback(int world_size) {
  auto box = std::make_shared<Mailbox>();
  std::vector<std::shared_ptr<Transport>> out;
  for (int rank = 0; rank < world_size; ++rank) {
    auto transport = std::make_shared<LoopbackTransport>(box, rank);
    box->ranks.push_back(transport.get());
    out.push_back(std::move(transport));
  }
  return out;
}

void kill_loopback_rank(const std::shared_ptr<Transport>& any, int rank) {
  static_cast<LoopbackTransport&>(*any).kill(rank);
}

}  // namespace meshcast
