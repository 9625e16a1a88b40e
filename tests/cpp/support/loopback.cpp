#include "support/loopback.h"

#include <condition_variable>
#include <cstring>
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

struct Pending {
  std::byte* data = nullptr;
  int64_t nbytes = 0;
  std::unique_ptr<Message> message;
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

  void send(const Envelope& to, const void* data, int64_t nbytes, std::unique_ptr<Message> message) override {
    // The mailbox only reads through a send's pointer.
    auto* bytes = const_cast<std::byte*>(static_cast<const std::byte*>(data));
    post({rank_, to.peer, to.key}, {bytes, nbytes, std::move(message)}, true);
  }

  void recv(const Envelope& from, void* data, int64_t nbytes, std::unique_ptr<Message> message) override {
    post({from.peer, rank_, from.key}, {static_cast<std::byte*>(data), nbytes, std::move(message)}, false);
  }

  void drive(const std::function<bool()>& /*done*/, TimePoint /*limit*/) override {}

  void wake() noexcept override {}

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
      mine.message->failed(peer, kAborted);
      return;
    }
    if (box_->dead.count(rank_) != 0 || box_->dead.count(peer) != 0) {
      told_locked(std::move(mine.message), peer, &kGone);
      return;
    }
    auto& others = (is_send ? box_->recvs : box_->sends)[key];
    if (others.empty()) {
      (is_send ? box_->sends : box_->recvs)[key].push_back(std::move(mine));
      return;
    }
    Pending other = std::move(others.front());
    others.pop_front();
    const Pending& sent = is_send ? mine : other;
    const Pending& received = is_send ? other : mine;
    if (sent.nbytes != received.nbytes) {
      throw std::logic_error("loopback: a message of " + std::to_string(sent.nbytes) +
                             " bytes met a receive of " + std::to_string(received.nbytes));
    }
    if (sent.nbytes > 0) std::memcpy(received.data, sent.data, static_cast<size_t>(sent.nbytes));
    told_locked(std::move(mine.message), peer, nullptr);
    box_->ranks[static_cast<size_t>(peer)]->told_locked(std::move(other.message), rank_, nullptr);
  }

  template <typename Concerns>
  void fail_locked(const Concerns& concerns, const TransportError& error) {
    for (const bool is_send : {true, false}) {
      for (auto& [key, waiting] : is_send ? box_->sends : box_->recvs) {
        if (!concerns(key, is_send)) continue;
        LoopbackTransport* rank = box_->ranks[static_cast<size_t>(owner(key, is_send))];
        for (Pending& each : waiting) rank->told_locked(std::move(each.message), owner(key, !is_send), &error);
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
