#include "transport/shm_pair_receiver.h"

#include <utility>

#include "transport/memory_message.h"

namespace meshcast {
namespace {

using Cause = TransportError::Cause;
using Kind = ShmPipe::Kind;

constexpr int64_t kReadInTurn = 256 * 1024;
constexpr int64_t kReadInCall = 64 * 1024;
constexpr int64_t kRecordBytes = 64;  // that a record without bytes counts as

}  // namespace

ShmPairReceiver::ShmPairReceiver(const ShmProgress::Place& place, ShmPipe& pipe, ShmPeer& peer)
    : place_(place), pipe_(pipe), peer_(peer), ends_(peer.rank()) {}

// If nothing comes any longer, it fails, in a turn if there still are turns.
template <typename End>
bool ShmPairReceiver::refuse(std::unique_lock<std::mutex>& lock, std::unique_ptr<End>& message) {
  if (!over_) return false;
  if (ends_.closed()) {
    const TransportError error = *over_;
    lock.unlock();
    message->failed(peer_.rank(), error);
  } else {
    ends_.add(std::move(message), over_);
    place_.call(ShmHalf::Receiving);
  }
  return true;
}

// A message meets its receive, with its `count` first bytes where it has begun.
template <typename Copy>
void ShmPairReceiver::begin_locked(PostedIt it, int64_t nbytes, int64_t count, bool begun, const Copy& copy) {
  const uint64_t key = it->first;
  Posted& posted = it->second;
  if (begun) pipe_.header().taken.fetch_add(ShmPipe::credit_of(static_cast<uint32_t>(count)));
  const bool asks = !begun || nbytes > ShmPipe::kSmallBytes;  // its sender waits for an answer
  const bool all = begun && count == nbytes;
  if (auto error = size_mismatch(nbytes, posted.nbytes)) {
    if (asks) post_locked(key, posted);  // the sender compares, too
    return end_locked(it, std::move(error));
  }
  copy(*posted.payload);
  posted.received = count;
  if (!all) return post_locked(key, posted);
  if (asks) answer_locked({key, ShmPipe::Answer::kTaken});
  end_locked(it, std::nullopt);
}

void ShmPairReceiver::recv(uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> payload) {
  std::unique_lock lock(mutex_);
  const auto arrival = arrivals_.extract(key);
  if (!arrival && refuse(lock, payload)) return;
  const PostedIt it = posted_.emplace(key, Posted{nbytes, 0, false, std::move(payload)}).first;
  if (arrival) {
    const Arrival& here = arrival.mapped();
    const auto count = static_cast<int64_t>(here.data.size());
    begin_locked(it, here.nbytes, count, here.begun,
                 [&](Incoming& message) { message.write(0, count, here.data.data()); });
  } else if (nbytes > ShmPipe::kSmallBytes) {
    post_locked(key, it->second);
  }
  pipe_.header().awaited.store(1);  // before the check: one side or the other sees a record that comes now
  if (read_locked(kReadInCall) || ends_.any_failed()) place_.call(ShmHalf::Receiving);
  settle_awaited_locked();
  ends_.tell(lock, false);
}

void ShmPairReceiver::probe(uint64_t key, std::unique_ptr<Message> message) {
  std::unique_lock lock(mutex_);
  if (arrivals_.contains(key)) {
    ends_.add(std::move(message), std::nullopt);
  } else {
    if (refuse(lock, message)) return;
    probes_[key] = std::move(message);
    pipe_.header().awaited.store(1);
    if (read_locked(kReadInCall)) place_.call(ShmHalf::Receiving);
    settle_awaited_locked();
  }
  ends_.tell(lock, false);
}

// Reads about `most` bytes. Returns whether there may be more; later records call, if this rank awaits
// something.
bool ShmPairReceiver::read_locked(int64_t most) {
  while (!over_ && most > 0) {
    const auto record = pipe_.read();
    if (!record && !pipe_.broken()) return false;
    if (!record || !take_locked(*record)) {
      lose_locked({Cause::Closed, kShmNonsense});
      return false;
    }
    pipe_.remove(*record);
    most -= record->count + kRecordBytes;
    // A writer without room announces that, then checks again: one of the two sees the other.
    auto& starved = pipe_.header().starved;
    if (starved.load() != 0 && pipe_.mostly_free() && starved.exchange(0) != 0) peer_.call(ShmHalf::Sending);
  }
  return !over_;
}

// False: the record makes no sense.
bool ShmPairReceiver::take_locked(const ShmPipe::Record& record) {
  switch (record.kind) {
    case Kind::Begin:
    case Kind::Announce:
      if (record.offset != 0 || (record.kind == Kind::Announce && record.count != 0)) return false;
      take_first_locked(record);
      return true;
    case Kind::Piece: return take_piece_locked(record);
  }
  return false;
}

void ShmPairReceiver::take_first_locked(const ShmPipe::Record& record) {
  const bool begun = record.kind == Kind::Begin;
  const auto it = posted_.find(record.key);
  if (it != posted_.end())
    return begin_locked(it, record.nbytes, record.count, begun,
                        [&](Incoming& message) { pipe_.copy(record, message); });
  Arrival arrival{record.nbytes, begun, std::vector<std::byte>(record.count)};
  MemoryIn kept(arrival.data.data(), nullptr);
  pipe_.copy(record, kept);
  arrivals_[record.key] = std::move(arrival);
  if (auto probe = probes_.extract(record.key)) ends_.add(std::move(probe.mapped()), std::nullopt);
}

bool ShmPairReceiver::take_piece_locked(const ShmPipe::Record& record) {
  const auto it = posted_.find(record.key);
  const bool all = record.offset + record.count == record.nbytes;
  if (it != posted_.end()) {
    Posted& posted = it->second;
    if (!posted.told || record.nbytes != posted.nbytes || record.offset != posted.received) return false;
    pipe_.copy(record, *posted.payload);
    posted.received += record.count;
    if (all) end_locked(it, std::nullopt);
  }
  if (all) answer_locked({record.key, ShmPipe::Answer::kTaken});  // also of one that has ended before
  return true;
}

void ShmPairReceiver::post_locked(uint64_t key, Posted& posted) {
  if (!std::exchange(posted.told, true)) answer_locked({key, posted.nbytes});
}

void ShmPairReceiver::answer_locked(ShmPipe::Answer answer) {
  unsaid_.push_back(answer);
  say_locked();
}

void ShmPairReceiver::say_locked() {
  auto& answers = pipe_.header().answers;
  bool any = false;
  while (!unsaid_.empty() && !answers.full()) {
    answers.push(unsaid_.front());
    unsaid_.pop_front();
    any = true;
  }
  // A sender that does not wait for an answer finds it when it has a message. It is notified of new room in any
  // case.
  if (any && (pipe_.header().answered.load() != 0 || answers.full())) peer_.call(ShmHalf::Sending);
}

void ShmPairReceiver::end_locked(PostedIt it, std::optional<TransportError> error) {
  ends_.add(std::move(it->second.payload), std::move(error));
  posted_.erase(it);
}

// They are written to only with the lock held, so they end at once.
void ShmPairReceiver::lose_locked(const TransportError& error) {
  if (over_) return;
  over_ = error;
  for (auto& [key, posted] : std::exchange(posted_, {})) ends_.add(std::move(posted.payload), error);
  for (auto& [key, probe] : std::exchange(probes_, {})) ends_.add(std::move(probe), error);
  std::erase_if(arrivals_, [](const auto& each) { return !each.second.whole(); });
  unsaid_.clear();
  place_.call(ShmHalf::Receiving);
}

void ShmPairReceiver::settle_awaited_locked() {
  if (posted_.empty() && probes_.empty()) pipe_.header().awaited.store(0, std::memory_order_relaxed);
}

bool ShmPairReceiver::turn() {
  std::unique_lock lock(mutex_);
  say_locked();
  const bool more = read_locked(kReadInTurn);
  if (gone_ && !more) lose_locked({Cause::Closed, kShmGone});
  settle_awaited_locked();
  ends_.tell(lock, true);
  return more;
}

void ShmPairReceiver::mark_gone() {
  const std::lock_guard lock(mutex_);
  gone_ = true;
  place_.call(ShmHalf::Receiving);
}

void ShmPairReceiver::abort() noexcept {
  const std::lock_guard lock(mutex_);
  lose_locked({Cause::Aborted, "the transport was aborted"});
  arrivals_.clear();
}

bool ShmPairReceiver::waits() {
  const std::lock_guard lock(mutex_);
  return !posted_.empty();
}

void ShmPairReceiver::finish() {
  abort();
  std::unique_lock lock(mutex_);
  ends_.close();
  ends_.tell(lock, true);
}

}  // namespace meshcast
