#include "simulation/world.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>

namespace meshcast::simulation {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Requests over one connection come one after the other, as torch's do.
class Storage::Connection final : public Store {
 public:
  explicit Connection(Storage& storage) : storage_(storage) {}

  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    const Unwatched unwatched;
    storage_.request();
    storage_.content_[key] = value;
    answer();
  }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    const std::lock_guard lock(mutex_);
    const Unwatched unwatched;
    storage_.request();
    const auto found = storage_.content_.find(key);
    std::string out = expected;
    if (found != storage_.content_.end()) {
      if (found->second == expected) found->second = desired;
      out = found->second;
    } else if (expected.empty()) {
      storage_.content_[key] = out = desired;
    }
    answer();
    return out;
  }
  int64_t add(const std::string& key, int64_t count) override {
    const std::lock_guard lock(mutex_);
    const Unwatched unwatched;
    storage_.request();
    std::string& value = storage_.content_[key];
    const int64_t sum = (value.empty() ? 0 : std::stoll(value)) + count;
    value = std::to_string(sum);
    answer();
    return sum;
  }
  void erase(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    const Unwatched unwatched;
    storage_.request();
    storage_.content_.erase(key);
    answer();
  }
  std::optional<std::vector<std::string>> read(const std::vector<std::string>& keys) override {
    const std::lock_guard lock(mutex_);
    const Unwatched unwatched;
    storage_.request();
    std::vector<std::string> out;
    for (const std::string& key : keys) {
      const auto found = storage_.content_.find(key);
      if (found != storage_.content_.end()) out.push_back(found->second);
    }
    answer();
    return out.size() == keys.size() ? std::optional(std::move(out)) : std::nullopt;
  }
  const void* connection() const override { return this; }

 private:
  void answer() { sleep_for(microseconds(storage_.scheduler_.draw(20, 100))); }

  Storage& storage_;
  Mutex mutex_;
};

std::shared_ptr<Store> Storage::connect() { return std::make_shared<Connection>(*this); }

void Storage::request() {
  ++requests_;
  const bool slow = health_ == Health::Slow;
  sleep_for(microseconds(slow ? scheduler_.draw(1000, 60000) : scheduler_.draw(20, 100)));
  while (health_ == Health::Frozen) sleep_for(milliseconds(50));
  if (health_ == Health::Dead) throw std::runtime_error("connection to the store closed");
}

void Storage::become(Health health) {
  if (health_ != Health::Dead) health_ = health;
}

// One rank's end. What ends is told by a thread of its own.
class Network::Endpoint final : public Transport, public std::enable_shared_from_this<Endpoint> {
 public:
  Endpoint(Network& network, int rank, std::string generation)
      : network_(network), rank_(rank), generation_(std::move(generation)), told_(network.ranks_) {
    teller_ = Thread([this] { tell(); });
  }
  ~Endpoint() override { Endpoint::shutdown(); }

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    post({rank_, to.peer, to.key}, to.peer, {nbytes, std::move(message), nullptr}, sends_);
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    post({from.peer, rank_, from.key}, from.peer, {nbytes, nullptr, std::move(message)}, recvs_);
  }

  std::string lost(int peer) override {
    const Unwatched unwatched;
    return network_.lost(rank_, peer);
  }
  void leave_because(const std::string& why) noexcept override {
    const Unwatched unwatched;
    if (network_.tells_) why_ = why;
  }
  std::string told(int peer) override {
    const Unwatched unwatched;
    return told_[static_cast<size_t>(peer)];
  }
  bool anybody_told() const noexcept override {
    const Unwatched unwatched;
    return std::any_of(told_.begin(), told_.end(), [](const auto& text) { return !text.empty(); });
  }

  void abort() noexcept override {
    const Unwatched unwatched;
    hand_over(&network_);
    if (std::exchange(aborted_, true)) return;
    const TransportError error(TransportError::Cause::Aborted, "aborted");
    for (auto* const waiting : {&sends_, &recvs_}) {
      for (auto& [key, pending] : *waiting) end(pending, peer_of(key), error);
      waiting->clear();
    }
    for (size_t peer = 0; peer < told_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_ || network_.link(rank_, static_cast<int>(peer)).cut) continue;
      network_.scheduler_.at(Clock::now() + delay(),
                             [&network = network_, peer, from = rank_, why = why_, generation = generation_] {
                               if (network.link(static_cast<int>(peer), from).cut ||
                                   network.silent_.count({from, static_cast<int>(peer)}))
                                 return;
                               if (const auto other = network.end(generation, static_cast<int>(peer)))
                                 other->peer_left(from, why);
                             });
    }
  }

  void shutdown() override {
    abort();
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    lock.unlock();
    if (teller_.joinable()) teller_.join();
  }

  // Between threads, as the rest: they change what no thread is in the middle of.
  void peer_left(int peer, const std::string& why) {
    told_[static_cast<size_t>(peer)] = why;
    left_.push_back(peer);
    break_with(peer, TransportError(TransportError::Cause::Closed, "the peer has left", why));
  }
  void lose(int peer) {
    break_with(peer, TransportError(TransportError::Cause::Closed, "the connection was lost"));
  }
  size_t pending() const { return sends_.size() + recvs_.size() + ended_.size() + hanging_; }
  void hang(Clock::duration lasts) { hangs_ = lasts; }

 private:
  friend class Network;
  struct Pending {
    int64_t nbytes = 0;
    std::unique_ptr<Outgoing> out;
    std::unique_ptr<Incoming> in;
    TimePoint ready{};

    std::shared_ptr<Message> message() {
      return out ? std::shared_ptr<Message>(std::move(out)) : std::shared_ptr<Message>(std::move(in));
    }
  };
  struct Ended {
    std::shared_ptr<Message> message;
    int peer = -1;
    std::optional<TransportError> error;
  };
  using Waiting = std::map<Key, Pending>;

  Clock::duration delay() { return microseconds(network_.scheduler_.draw(20, 400)); }
  int peer_of(const Key& key) const { return std::get<0>(key) == rank_ ? std::get<1>(key) : std::get<0>(key); }

  void post(const Key& key, int peer, Pending mine, Waiting& waiting) {
    const Unwatched unwatched;
    hand_over(&network_);
    network_.scheduler_.yield();
    const auto& link = network_.link(rank_, peer);
    const bool left = std::find(left_.begin(), left_.end(), peer) != left_.end();
    if (aborted_) return end(mine, peer, TransportError(TransportError::Cause::Aborted, "aborted"));
    if (link.noticed)
      return end(mine, peer, TransportError(TransportError::Cause::Closed, "the connection was lost"));
    if (left)
      return end(
          mine, peer,
          TransportError(TransportError::Cause::Closed, "the peer has left", told_[static_cast<size_t>(peer)]));
    if (!waiting.emplace(key, std::move(mine)).second)
      throw Violation(fmt::format("rank {}: two messages in flight have one key", rank_));
    network_.scheduler_.at(
        Clock::now() + delay() + network_.lag_,
        [&network = network_, generation = generation_, key] { network.match(generation, key); });
  }

  void break_with(int peer, const TransportError& error) {
    for (auto* const waiting : {&sends_, &recvs_}) {
      for (auto it = waiting->begin(); it != waiting->end();) {
        if (peer_of(it->first) != peer) {
          ++it;
          continue;
        }
        end(it->second, peer, error);
        it = waiting->erase(it);
      }
    }
  }

  void end(Pending& pending, int peer, std::optional<TransportError> error) {
    const auto message = pending.message();
    if (error && error->cause() == TransportError::Cause::Aborted && hangs_ > Clock::duration::zero()) {
      ++hanging_;
      network_.scheduler_.at(Clock::now() + hangs_, [self = shared_from_this(), message, peer, error] {
        --self->hanging_;
        self->tell_soon({message, peer, error});
      });
      return;
    }
    tell_soon({message, peer, std::move(error)});
  }

  void tell_soon(Ended ended) {
    ended_.push_back(std::move(ended));
    changed_.notify_all();
    if (!network_.scheduler_.inside()) network_.scheduler_.notify(changed_, true);
  }

  void tell() {
    while (auto next = next_ended()) {
      take_over(&network_);
      if (next->error) {
        next->message->failed(next->peer, *next->error);
      } else {
        next->message->finished();
      }
      next->message.reset();
    }
  }

  // Waits for one; none once it is closed.
  std::optional<Ended> next_ended() {
    std::unique_lock lock(mutex_);
    const Unwatched unwatched;
    while (ended_.empty() && (!closed_ || hanging_ > 0)) changed_.wait(lock);
    if (ended_.empty()) return std::nullopt;
    Ended next = std::move(ended_.front());
    ended_.pop_front();
    return next;
  }

  Network& network_;
  const int rank_;
  const std::string generation_;
  Waiting sends_;
  Waiting recvs_;
  std::deque<Ended> ended_;
  std::vector<std::string> told_;
  std::vector<int> left_;
  std::string why_;
  Clock::duration hangs_{};
  size_t hanging_ = 0;
  bool aborted_ = false;
  bool closed_ = false;
  Mutex mutex_;
  Condition changed_;
  Thread teller_;
};

Network::Network(Scheduler& scheduler, int ranks, bool tells)
    : scheduler_(scheduler), tells_(tells), ranks_(static_cast<size_t>(ranks)) {}
Network::~Network() = default;

std::shared_ptr<Transport> Network::join(int rank, const std::string& generation) {
  auto made = std::make_shared<Endpoint>(*this, rank, generation);
  const Unwatched unwatched;
  std::erase_if(generations_, [this](const auto& each) {  // those that all ranks have joined, and left
    const bool over =
        joined_[each.first] == ranks_ &&
        std::all_of(each.second.begin(), each.second.end(), [](const auto& end) { return end.expired(); });
    if (over) joined_.erase(each.first);
    return over;
  });
  Ends& ends = generations_[generation];
  ends.resize(ranks_);
  ends[static_cast<size_t>(rank)] = made;
  ++joined_[generation];
  ranks_joined_.insert(rank);
  return made;
}

size_t Network::joined(const std::string& generation) const {
  const Unwatched unwatched;
  const auto found = joined_.find(generation);
  return found == joined_.end() ? 0 : found->second;
}

std::shared_ptr<Network::Endpoint> Network::end(const std::string& generation, int rank) const {
  const auto found = generations_.find(generation);
  return found == generations_.end() ? nullptr : found->second[static_cast<size_t>(rank)].lock();
}

std::string Network::lost(int rank, int other) {
  const Unwatched unwatched;
  if (!tells_ || other == rank || !link(rank, other).noticed) return {};
  return "the connection was lost";
}

void Network::match(const std::string& generation, const Key& key) {
  const auto& [from, to, number] = key;
  const auto sender = end(generation, from);
  const auto receiver = end(generation, to);
  if (!sender || !receiver || link(from, to).cut || silent_.count({from, to})) return;
  const auto sent = sender->sends_.find(key);
  const auto received = receiver->recvs_.find(key);
  if (sent == sender->sends_.end() || received == receiver->recvs_.end()) return;
  if (sent->second.nbytes != received->second.nbytes)
    throw Violation(fmt::format("a message of {} bytes from rank {} met a receive of {} at rank {}",
                                sent->second.nbytes, from, received->second.nbytes, to));
  std::vector<std::byte> bytes(static_cast<size_t>(sent->second.nbytes));
  const int64_t half = sent->second.nbytes / 2;
  sent->second.out->read(0, half, bytes.data());
  sent->second.out->read(half, sent->second.nbytes - half, bytes.data() + half);
  received->second.in->write(0, sent->second.nbytes, bytes.data());
  sender->end(sent->second, to, std::nullopt);
  receiver->end(received->second, from, std::nullopt);
  sender->sends_.erase(sent);
  receiver->recvs_.erase(received);
}

void Network::cut(int one, int other, std::optional<Clock::duration> noticed) {
  link(one, other).cut = true;
  if (noticed) scheduler_.at(Clock::now() + *noticed, [this, one, other] { notice(one, other); });
}

void Network::notice(int one, int other) {
  link(one, other).noticed = true;
  for (const auto& [generation, ends] : generations_) {
    if (const auto mine = end(generation, one)) mine->lose(other);
    if (const auto its = end(generation, other)) its->lose(one);
  }
}

void Network::kill(int rank, Clock::duration noticed) {
  for (int other = 0; other < static_cast<int>(ranks_); ++other)
    if (other != rank) cut(rank, other, noticed);
}

void Network::hang(int rank, Clock::duration lasts) {
  for (const auto& [generation, ends] : generations_)
    if (const auto its = end(generation, rank)) its->hang(lasts);
}

size_t Network::in_flight() const {
  size_t out = 0;
  for (const auto& [generation, ends] : generations_)
    for (const auto& each : ends)
      if (const auto its = each.lock()) out += its->pending();
  return out;
}

}  // namespace meshcast::simulation
