// How messages come to a rank.
#include <utility>

#include "ucx/group_transport.h"
#include "ucx/process_plane.h"

namespace meshcast::ucx {
namespace {

using Cause = TransportError::Cause;

}  // namespace

void GroupTransport::recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) {
  if (plane_->foreign()) return message->failed(from.peer, kForked);
  std::unique_lock lock(plane_->mutex());
  if (aborted_) {
    lock.unlock();
    return message->failed(from.peer, kAborted);
  }
  auto arrival = arrivals_.extract(Key{from.peer, from.key});
  int64_t arrived = 0;
  if (arrival && !arrival.mapped().data.empty()) {
    const Arrival& begun = arrival.mapped();
    const auto count = static_cast<int64_t>(begun.data.size());
    if (begun.nbytes == nbytes) {
      lock.unlock();  // no other thread knows the message yet
      message->write(0, count, begun.data.data());
      lock.lock();
      arrived = count;
    }
    credit_locked(from.peer, count);
  }
  if (arrival && !arrival.mapped().announced) {
    if (arrival.mapped().data.empty()) credit_locked(from.peer, 0);
    if (!aborted_ && arrival.mapped().nbytes > kSmallBytes)
      answer_locked(from.peer, from.key, arrival.mapped().nbytes, nbytes);
    end_locked(from.peer, std::move(message), aborted_ ? kAborted : mismatch(arrival.mapped().nbytes, nbytes));
    lock.unlock();
    return plane_->tell();
  }
  // A receive connects, too: else this rank would not notice that the peer dies.
  std::string why;
  if (aborted_ || !link_for_locked(from.peer, from.key, from.peer, &why)) {
    lock.unlock();
    return message->failed(from.peer, why.empty() ? kAborted : TransportError(Cause::Closed, why));
  }
  Receiving& receiving = receivings_[{from.peer, from.key}];
  receiving.message = std::move(message);
  receiving.nbytes = nbytes;
  receiving.arrived = arrived;
  if (arrival) {
    announced_locked({id_, from.key, from.peer, 0, 0, arrival.mapped().nbytes});
  } else if (nbytes > (from.in_turn ? kSmallBytes : kEagerBytes)) {
    post_locked(from.peer, from.key, receiving);
  }
  lock.unlock();
  plane_->tell();
}

void GroupTransport::probe(const Envelope& from, std::unique_ptr<Message> message) {
  if (plane_->foreign()) return message->failed(from.peer, kForked);
  std::unique_lock lock(plane_->mutex());
  const Key key{from.peer, from.key};
  std::string why;
  if (aborted_) {
    end_locked(from.peer, std::move(message), kAborted);
  } else if (arrivals_.contains(key)) {
    end_locked(from.peer, std::move(message), std::nullopt);
  } else if (link_for_locked(from.peer, from.key, from.peer, &why)) {
    probes_[key] = std::move(message);
  } else {
    end_locked(from.peer, std::move(message), TransportError(Cause::Closed, why));
  }
  lock.unlock();
  plane_->tell();
}

void GroupTransport::arrive_locked(const Key& key, Arrival arrival) {
  arrivals_[key] = std::move(arrival);
  if (auto probe = probes_.extract(key)) end_locked(key.peer, std::move(probe.mapped()), std::nullopt);
}

void GroupTransport::post_locked(int peer, uint64_t key, Receiving& receiving) {
  if (std::exchange(receiving.posted, true)) return;
  std::string why;
  if (const auto link = link_for_locked(peer, key, peer, &why)) {
    say_locked(link, peer, Kind::Post, {id_, key, rank_, 0, 0, receiving.nbytes});
  }
}

void GroupTransport::announced_locked(const Header& header) {
  const Key key{header.sender, header.key};
  const auto it = receivings_.find(key);
  if (it == receivings_.end()) {
    return arrive_locked(key, {{}, header.nbytes, true});
  }
  post_locked(key.peer, key.key, it->second);  // the sender compares the sizes, too
  if (auto error = mismatch(header.nbytes, it->second.nbytes)) {
    end_locked(key.peer, std::move(it->second.message), std::move(error));
    receivings_.erase(it);
  }
}

void GroupTransport::data_locked(const Header& header, const std::byte* data, int64_t nbytes) {
  if (header.offset < 0 || nbytes > header.nbytes || header.offset > header.nbytes - nbytes) return;
  const Key key{header.sender, header.key};
  const bool eager = header.count == 1;
  const bool announces = eager && nbytes < header.nbytes;
  const auto it = receivings_.find(key);
  if (it == receivings_.end()) {  // what has ended takes no more fragments
    if (eager) arrive_locked(key, {{data, data + nbytes}, header.nbytes, announces});
    return;
  }
  Receiving& receiving = it->second;
  if (eager) credit_locked(key.peer, nbytes);
  if (announces) post_locked(key.peer, key.key, receiving);  // the sender compares the sizes, too
  const int64_t expected = receiving.nbytes;
  auto error = mismatch(header.nbytes, receiving.nbytes);
  if (!error) {
    receiving.message->write(header.offset, nbytes, data);
    receiving.arrived += nbytes;
    if (receiving.arrived < receiving.nbytes) return;
  }
  const bool posted = receiving.posted;
  end_locked(key.peer, std::move(receiving.message), std::move(error));
  receivings_.erase(it);
  if (eager && header.nbytes <= kSmallBytes) return;
  if (!posted || header.nbytes == expected) answer_locked(key.peer, key.key, header.nbytes, expected);
}

// The sender of a message that is not small waits for this: all of it was taken, or the size that was expected
// instead.
void GroupTransport::answer_locked(int peer, uint64_t key, int64_t nbytes, int64_t expected) {
  std::string why;
  const auto link = link_for_locked(peer, key, peer, &why);
  if (!link) return;
  if (nbytes == expected) {
    say_locked(link, peer, Kind::Taken, {id_, key, rank_, 0, 0, 0});
  } else {
    say_locked(link, peer, Kind::Post, {id_, key, rank_, 0, 0, expected});
  }
}

// Gives credit back, not for each message but once half of it was used.
void GroupTransport::credit_locked(int peer, int64_t nbytes) {
  int64_t& taken = peer_at(peer).taken;
  taken += credit_of(nbytes);
  if (taken < kCreditBytes / 2) return;
  const auto count = static_cast<int32_t>(std::exchange(taken, 0));
  std::string why;
  const auto link = link_locked(peer, 0, &why);
  if (link) say_locked(link, peer, Kind::Credit, {id_, 0, rank_, count, 0, 0});
}

}  // namespace meshcast::ucx
