#include "transport/shm_pair_sender.h"

#include <algorithm>
#include <string>
#include <utility>

namespace meshcast {
namespace {

using Cause = TransportError::Cause;
using Kind = ShmPipe::Kind;

// Bytes written at a time: small enough that the peer reads it from a core's caches while the next is written.
constexpr int64_t kPieceBytes = 64 * 1024;
// Bytes that a call writes: more is left to a waiting thread, or to the thread.
constexpr int64_t kWrittenInCall = 64 * 1024;
constexpr int64_t kWrittenInTurn = 128 * 1024;

}  // namespace

ShmPairSender::ShmPairSender(const ShmProgress::Place& place, ShmPipe& pipe, ShmPeer& peer)
    : place_(place), pipe_(pipe), peer_(peer), ends_(peer.rank()) {}

void ShmPairSender::send(uint64_t key, int64_t nbytes, std::unique_ptr<Outgoing> payload) {
  std::unique_lock lock(mutex_);
  if (over_) {
    if (ends_.closed()) {
      const TransportError error = *over_;
      lock.unlock();
      return payload->failed(peer_.rank(), error);
    }
    ends_.add(std::move(payload), over_);
    return place_.call(ShmHalf::Sending);  // a turn reports it
  }
  const uint64_t credit = ShmPipe::credit_of(first_bytes(nbytes));
  const bool begins = credit_used_ - pipe_.header().taken.load() + credit <= ShmPipe::kCreditBytes;
  const bool asks = !begins || nbytes > ShmPipe::kSmallBytes;
  if (begins) credit_used_ += credit;
  Message& message = messages_[key];
  message.nbytes = nbytes;
  message.step = begins ? Step::Begin : Step::Announce;
  message.payload = std::move(payload);
  if (!asks && pipe_.has_room(nbytes)) {  // before others that have no room: keys match messages and receives
    write_next_locked(key, message);
    return ends_.tell(lock, false);
  }
  line_.push_back(key);
  if (asks) {
    pipe_.header().answered.store(1);  // before the check: one side sees an answer that comes now
    read_answers_locked();
    if (const auto post = posts_.extract(key)) posted_locked(key, post.mapped());
  }
  if (write_locked(kWrittenInCall) || ends_.any_failed()) place_.call(ShmHalf::Sending);
  ends_.tell(lock, false);
}

void ShmPairSender::read_answers_locked() {
  auto& answers = pipe_.header().answers;
  bool was_full = false;
  ShmPipe::Answer answer;
  // Reads no more than the queue holds, so that the peer cannot keep this rank for longer.
  uint32_t left = ShmPipe::kMaxAnswers;
  for (; left > 0 && !answers.broken() && answers.pop(&answer); --left) {
    was_full |= answers.was_full();
    if (answer.nbytes != ShmPipe::Answer::kTaken) {
      posted_locked(answer.key, answer.nbytes);
    } else if (const auto it = messages_.find(answer.key);
               it != messages_.end() && it->second.step == Step::Written) {
      end_locked(answer.key, std::nullopt);
    }
  }
  if (answers.broken()) return lose_locked({Cause::Closed, kShmNonsense});
  if (left == 0) place_.call(ShmHalf::Sending);  // there may be more
  if (was_full) peer_.call(ShmHalf::Receiving);  // it has more that found no room
  if (messages_.empty()) pipe_.header().answered.store(0, std::memory_order_relaxed);
}

void ShmPairSender::posted_locked(uint64_t key, int64_t nbytes) {
  const auto it = messages_.find(key);
  if (it == messages_.end()) {
    posts_[key] = nbytes;
    return;
  }
  Message& message = it->second;
  if (message.step == Step::Pieces) return;  // it was posted before
  if (message.step == Step::Begin) {
    if (message.nbytes <= ShmPipe::kSmallBytes) return;  // it goes in any case, and the receiver compares
    credit_used_ -= ShmPipe::credit_of(first_bytes(message.nbytes));
    message.step = Step::Announce;
  }
  if (auto error = size_mismatch(message.nbytes, nbytes)) {
    // Announced first, if it has not been: the receiver compares, too.
    if (message.step != Step::Announce) return end_locked(key, std::move(error));
    message.error = std::move(error);
  } else if (message.step == Step::Announce) {
    message.step = Step::Pieces;
  } else if (message.step == Step::Waits) {
    message.step = Step::Pieces;
    line_.push_back(key);
  }
}

// If there is none, the peer calls this rank once there is plenty.
bool ShmPairSender::have_room_locked(int64_t count) {
  if (pipe_.has_room(count)) return true;
  auto& starved = pipe_.header().starved;
  if (starved.exchange(1) == 0) peer_.call(ShmHalf::Receiving);
  if (!pipe_.has_room(count)) return false;
  starved.store(0);
  return true;
}

uint32_t ShmPairSender::first_bytes(int64_t nbytes) const {
  return static_cast<uint32_t>(std::min({nbytes, kPieceBytes, pipe_.most()}));
}

ShmPipe::Record ShmPairSender::next_of(uint64_t key, const Message& message) const {
  const uint32_t count = first_bytes(message.nbytes - message.written);
  switch (message.step) {
    case Step::Begin: return {key, message.nbytes, 0, count, Kind::Begin};
    case Step::Announce: return {key, message.nbytes, 0, 0, Kind::Announce};
    default: return {key, message.nbytes, message.written, count, Kind::Piece};
  }
}

// Writes about so many bytes. Answers whether there is room for more.
bool ShmPairSender::write_locked(int64_t most) {
  while (!line_.empty()) {
    const uint64_t key = line_.front();
    Message& message = messages_.at(key);
    const uint32_t count = next_of(key, message).count;
    if (most <= 0) return true;
    if (!have_room_locked(count)) {
      if (pipe_.broken()) lose_locked({Cause::Closed, kShmNonsense});
      return false;
    }
    if (message.step != Step::Pieces || message.written + count == message.nbytes) line_.pop_front();
    write_next_locked(key, message);
    most -= count;
  }
  return false;
}

// The message is not in the line any longer unless more of it goes.
void ShmPairSender::write_next_locked(uint64_t key, Message& message) {
  const ShmPipe::Record record = next_of(key, message);
  pipe_.write(record, *message.payload);
  // A peer that does not wait finds it when it does.
  if (pipe_.header().awaited.load() != 0) peer_.call(ShmHalf::Receiving);
  message.written += record.count;
  const bool all = record.kind != Kind::Announce && message.written == message.nbytes;
  if (message.error || (all && record.kind == Kind::Begin && message.nbytes <= ShmPipe::kSmallBytes)) {
    end_locked(key, std::exchange(message.error, std::nullopt));
  } else if (all) {
    message.step = Step::Written;
  } else if (record.kind != Kind::Piece) {
    message.step = Step::Waits;
  }
}

void ShmPairSender::end_locked(uint64_t key, std::optional<TransportError> error) {
  auto ended = messages_.extract(key);
  ends_.add(std::move(ended.mapped().payload), std::move(error));
}

// Their memory is read only with the lock held, so they end at once.
void ShmPairSender::lose_locked(const TransportError& error) {
  if (over_) return;
  over_ = error;
  for (auto& [key, message] : std::exchange(messages_, {})) ends_.add(std::move(message.payload), error);
  line_.clear();
  posts_.clear();
  place_.call(ShmHalf::Sending);
}

bool ShmPairSender::turn(const std::function<bool()>& helped) {
  std::unique_lock lock(mutex_);
  bool more = false;
  if (!over_) {
    read_answers_locked();
    more = !line_.empty();
    if (more && (messages_.at(line_.front()).nbytes <= kWrittenInCall || !helped()))
      more = write_locked(kWrittenInTurn);
  }
  ends_.tell(lock, true);
  return more;
}

void ShmPairSender::mark_gone() {
  const std::lock_guard lock(mutex_);
  if (over_) return;
  read_answers_locked();  // what it had said before
  lose_locked({Cause::Closed, kShmGone});
}

void ShmPairSender::abort() noexcept {
  const std::lock_guard lock(mutex_);
  lose_locked({Cause::Aborted, "the transport was aborted"});
}

void ShmPairSender::finish() {
  abort();
  std::unique_lock lock(mutex_);
  ends_.close();
  ends_.tell(lock, true);
}

}  // namespace meshcast
