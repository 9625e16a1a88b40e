// How messages leave a rank.
#include <algorithm>
#include <utility>

#include "common/fault_point.h"
#include "ucx/group_transport.h"
#include "ucx/process_plane.h"

namespace meshcast::ucx {
namespace {

using Cause = TransportError::Cause;

// Fragments of one line that UCX has at a time: one is sent while the next is packed. A single one if a process
// has many in use: then the other lines keep it busy.
constexpr int kFragmentsAhead = 4;

}  // namespace

void GroupTransport::send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) {
  if (plane_->foreign()) return message->failed(to.peer, kForked);
  const Key key{to.peer, to.key};
  const int64_t head = std::min(nbytes, kEagerBytes);
  const std::byte* packed = message->packed();
  std::unique_lock lock(plane_->mutex());
  Fragment buffer;
  if (!packed && may_send_eagerly_locked(to, nbytes)) buffer = pack(lock, *message, 0, head);
  std::string why;
  const auto link = aborted_ ? nullptr : link_for_locked(to.peer, to.key, rank_, &why);
  const bool eager = link && may_send_eagerly_locked(to, nbytes);  // asked again: others may have sent
  if (buffer && !eager) plane_->give_back_locked(std::move(buffer));
  if (!link) {
    lock.unlock();
    return message->failed(to.peer, why.empty() ? kAborted : TransportError(Cause::Closed, why));
  }
  std::unique_ptr<Flight> flight;
  if (eager) {
    peer_at(to.peer).credit -= credit_of(head);
    flight = std::make_unique<Flight>();
    flight->buffer = std::move(buffer);
    flight->group = this;
    flight->link = link;
    flight->peer = to.peer;
    flight->header = {id_, to.key, rank_, 1, 0, nbytes};
  }
  const std::byte* data = packed || !eager ? packed : flight->buffer.get();
  if (eager && nbytes <= kSmallBytes) {
    flight->message = std::move(message);
    const bool ended = plane_->send_locked(std::move(flight), data, nbytes);
    lock.unlock();
    if (ended) plane_->tell();
    return;
  }
  auto sending = std::make_shared<Sending>();
  sending->peer = to.peer;
  sending->key = to.key;
  sending->link = link;
  sending->nbytes = nbytes;
  sending->packed = packed;
  sending->message = std::move(message);
  sendings_[key] = sending;
  if (eager) {  // all of it, or the beginning, which announces the rest
    flight->sending = sending;
    sending->announced = true;
    sending->issued = head;
    sending->all_issued = head == nbytes;
    ++sending->in_flight;
    plane_->send_locked(std::move(flight), data, head);
  }
  if (const auto post = posts_.extract(key)) {
    post_arrived_locked({id_, to.key, to.peer, 0, 0, post.mapped()});
  } else if (!eager && !leaves(to.peer)) {  // a rank that leaves takes nothing: it counts as lost soon
    announce_locked(*sending);
  }
  lock.unlock();
  plane_->tell();
}

// True if its first bytes, up to kEagerBytes, may go at once. Those of a message that is posted need not: all
// of it may.
bool GroupTransport::may_send_eagerly_locked(const Envelope& to, int64_t nbytes) {
  if (to.in_turn && nbytes > kSmallBytes) return false;
  if (nbytes > kEagerBytes && posts_.contains(Key{to.peer, to.key})) return false;
  return peer_at(to.peer).credit >= credit_of(std::min(nbytes, kEagerBytes)) && !leaves(to.peer);
}

// Without the lock while it packs, which may take as long as sending.
Fragment GroupTransport::pack(std::unique_lock<std::mutex>& lock, Outgoing& message, int64_t offset,
                              int64_t nbytes) {
  Fragment buffer = plane_->fragment_locked();
  lock.unlock();
  try {
    message.read(offset, nbytes, buffer.get());
  } catch (...) {
    lock.lock();
    plane_->give_back_locked(std::move(buffer));
    throw;
  }
  lock.lock();
  return buffer;
}

void GroupTransport::announce_locked(Sending& sending) {
  if (std::exchange(sending.announced, true)) return;
  say_locked(sending.link, sending.peer, Kind::Announce, {id_, sending.key, rank_, 0, 0, sending.nbytes});
}

void GroupTransport::post_arrived_locked(const Header& header) {
  const Key key{header.sender, header.key};
  const auto it = sendings_.find(key);
  if (it == sendings_.end()) {
    posts_[key] = header.nbytes;
    return;
  }
  const std::shared_ptr<Sending> sending = it->second;
  if (auto error = mismatch(sending->nbytes, header.nbytes)) {
    announce_locked(*sending);  // the receiver compares, too
    return give_up_locked(sending, *error);
  }
  if (sending->line) return;
  auto& line = lines_[{sending->peer, sending->link.get()}];
  if (!line) line = std::make_shared<Line>();
  sending->line = line;
  line->waiting.push_back(sending);
  queue_pump_locked(line);
}

void GroupTransport::queue_pump_locked(const std::shared_ptr<Line>& line) {
  if (line->queued || line->pumped) return;
  line->queued = true;
  ++untold_;
  plane_->queue_locked(Pump{this, line});
}

// The message whose fragments go next; null if there is none.
Sending* GroupTransport::front_locked(Line& line) {
  while (!line.waiting.empty()) {
    const Sending& first = *line.waiting.front();
    if (!first.error && !first.all_issued && first.link->failure.empty()) break;
    line.waiting.pop_front();
  }
  return line.waiting.empty() ? nullptr : line.waiting.front().get();
}

bool GroupTransport::may_send_locked(Line& line) {
  const int ahead = plane_->many_fragments_locked() ? 1 : kFragmentsAhead;
  return line.in_flight < ahead && front_locked(line) != nullptr;
}

// One thread at a time for each line.
void GroupTransport::pump(const std::shared_ptr<Line>& line) {
  std::unique_lock lock(plane_->mutex());
  line->queued = false;
  if (std::exchange(line->pumped, true)) return;
  while (may_send_locked(*line)) {
    const std::shared_ptr<Sending> sending = line->waiting.front();
    const int64_t nbytes = std::min<int64_t>(kFragmentBytes, sending->nbytes - sending->issued);
    auto flight = std::make_unique<Flight>();
    const std::byte* data = sending->packed + sending->issued;
    if (!sending->packed) {
      sending->reading = true;
      try {
        flight->buffer = pack(lock, *sending->message, sending->issued, nbytes);
      } catch (...) {
        sending->reading = false;
        throw;
      }
      data = flight->buffer.get();
      sending->reading = false;
      if (front_locked(*line) != sending.get()) {  // it has failed meanwhile
        plane_->give_back_locked(std::move(flight->buffer));
        settle_locked(sending);
        continue;
      }
    }
    flight->group = this;
    flight->link = sending->link;
    flight->peer = sending->peer;
    flight->sending = sending;
    flight->line = line;
    flight->header = {id_, sending->key, rank_, 0, sending->issued, sending->nbytes};
    sending->issued += nbytes;
    sending->all_issued = sending->issued == sending->nbytes;
    ++sending->in_flight;
    ++line->in_flight;
    plane_->send_locked(std::move(flight), data, nbytes);
    MC_FAULT_POINT("fragment");
  }
  line->pumped = false;
}

void GroupTransport::starve(Line& line) {
  const std::lock_guard lock(plane_->mutex());
  line.pumped = false;
  const TransportError error(Cause::Memory, "no memory for a message");
  for (const auto& sending : std::exchange(line.waiting, {})) give_up_locked(sending, error);
}

void GroupTransport::taken_locked(const Header& header) {
  const auto it = sendings_.find({header.sender, header.key});
  if (it == sendings_.end()) return;
  const std::shared_ptr<Sending> sending = it->second;
  sending->taken = true;
  settle_locked(sending);
}

void GroupTransport::give_up_locked(const std::shared_ptr<Sending>& sending, const TransportError& error) {
  if (!sending->error) sending->error = error;
  settle_locked(sending);
}

// Ends it if it is over and its memory is not being read any longer.
void GroupTransport::settle_locked(const std::shared_ptr<Sending>& sending) {
  if (!sending->message || sending->in_flight > 0 || sending->reading) return;
  if (!sending->error && !(sending->taken && sending->all_issued)) return;
  sendings_.erase({sending->peer, sending->key});
  end_locked(sending->peer, std::move(sending->message), sending->error);
}

void GroupTransport::ended_locked(Flight* flight, ucs_status_t status) {
  flights_.erase(flight);
  const std::unique_ptr<Flight> owned(flight);
  if (owned->buffer) plane_->give_back_locked(std::move(owned->buffer));
  std::optional<TransportError> error;
  if (status != UCS_OK && aborted_) {
    error = kAborted;
  } else if (status != UCS_OK) {
    const std::string& why = owned->link->failure;
    error.emplace(Cause::Closed, why.empty() ? plane_->api().ucs_status_string(status) : why);
  }
  if (const auto& sending = owned->sending) {
    --sending->in_flight;
    if (owned->line) {
      --owned->line->in_flight;
      if (!owned->line->waiting.empty()) queue_pump_locked(owned->line);
    }
    if (error && !sending->error) sending->error = error;
    settle_locked(sending);
  } else if (owned->message) {
    const std::string& lost = peer_at(owned->peer).lost;
    if (!error && !aborted_ && !lost.empty()) error.emplace(Cause::Closed, lost);
    end_locked(owned->peer, std::move(owned->message), std::move(error));
  }
}

}  // namespace meshcast::ucx
