#include "ucx/group_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "ucx/process_plane.h"

namespace meshcast::ucx {
namespace {

using Cause = TransportError::Cause;

// Peers that are alive end what they are in the middle of within this time.
constexpr auto kBusyGrace = std::chrono::milliseconds(500);
// A rank that leaves because the group has failed there tells why through the store. That gets a head start.
constexpr auto kLeaveGrace = std::chrono::milliseconds(300);

const TransportError kAborted(Cause::Aborted, "the transport was aborted");
const TransportError kForked(Cause::Closed, "this process was forked from the one that made the connections");

}  // namespace

GroupTransport::GroupTransport(std::shared_ptr<ProcessPlane> plane, uint64_t id, std::vector<Address> members,
                               int rank, std::vector<int32_t> first_rail)
    : plane_(std::move(plane)),
      id_(id),
      members_(std::move(members)),
      rank_(rank),
      first_rail_(std::move(first_rail)),
      peers_(members_.size()) {
  for (size_t peer = 0; peer < peers_.size(); ++peer) peers_[peer].rank = static_cast<int>(peer);
}

// The rail is the sender's turn, so both ends find the same one.
size_t GroupTransport::rail_of(int peer, uint64_t key, int sender) const {
  const size_t turn = static_cast<size_t>(first_rail_[static_cast<size_t>(sender)]) + (key & 0xFF);
  return turn % members_[static_cast<size_t>(peer)].rails.size();
}

std::shared_ptr<Link> GroupTransport::link_locked(int peer, size_t rail, std::string* why) {
  *why = peer_at(peer).lost;
  if (!why->empty()) return nullptr;
  const Address& address = members_[static_cast<size_t>(peer)];
  try {
    auto link = plane_->link_locked(address.process, rail, address.rails[rail]);
    if (link->failure.empty()) return link;
    *why = link->failure;
  } catch (const Error& error) {
    *why = error.what();
  }
  return nullptr;
}

void GroupTransport::send(const Envelope& to, const void* data, int64_t nbytes,
                          std::unique_ptr<Message> message) {
  if (plane_->foreign()) return message->failed(to.peer, kForked);
  std::unique_lock lock(plane_->mutex());
  if (aborted_) {
    lock.unlock();
    return message->failed(to.peer, kAborted);
  }
  std::string why;
  auto link = link_locked(to.peer, rail_of(to.peer, to.key, rank_), &why);
  if (!link) {
    lock.unlock();
    return message->failed(to.peer, {Cause::Closed, why});
  }
  int32_t& credit = peer_at(to.peer).credits;
  const bool small = nbytes <= kEagerBytes && credit > 0;
  if (small) --credit;
  auto flight = std::make_unique<Flight>();
  flight->group = this;
  flight->link = std::move(link);
  flight->peer = to.peer;
  flight->sends = true;
  flight->message = std::move(message);
  flight->header = DataHeader{id_, to.key, rank_, 0};
  if (plane_->send_locked(std::move(flight), data, nbytes, small)) {
    lock.unlock();
    plane_->tell();
  }
}

void GroupTransport::recv(const Envelope& from, void* data, int64_t nbytes, std::unique_ptr<Message> message) {
  if (plane_->foreign()) return message->failed(from.peer, kForked);
  std::unique_lock lock(plane_->mutex());
  if (aborted_) {
    lock.unlock();
    return message->failed(from.peer, kAborted);
  }
  Posted posted{static_cast<std::byte*>(data), nbytes, std::move(message)};
  const Key key{from.peer, from.key};
  const auto it = arrivals_.find(key);
  if (it == arrivals_.end()) {
    // Connected also to receive: else this rank would not notice that the peer dies.
    std::string why;
    if (!link_locked(from.peer, rail_of(from.peer, from.key, from.peer), &why)) {
      lock.unlock();
      return posted.message->failed(from.peer, {Cause::Closed, why});
    }
    posted_.emplace(key, std::move(posted));
    return;
  }
  Arrival arrival = std::move(it->second);
  arrivals_.erase(it);
  if (arrival.descriptor) {
    receive_locked(from.peer, std::move(posted), arrival.descriptor, *arrival.worker);
  } else {
    std::memcpy(posted.data, arrival.data.data(), static_cast<size_t>(std::min(arrival.nbytes, posted.nbytes)));
    end_locked(from.peer, std::move(posted.message), mismatch(arrival.nbytes, nbytes));
    matched_locked(from.peer);
  }
  lock.unlock();
  plane_->tell();
}

std::optional<TransportError> GroupTransport::mismatch(int64_t nbytes, int64_t expected) {
  if (nbytes == expected) return std::nullopt;
  return TransportError(Cause::Closed,
                        fmt::format("a message of {} bytes came where {} were expected", nbytes, expected));
}

void GroupTransport::arrived_locked(const DataHeader& header, const std::byte* data, int64_t nbytes) {
  if (aborted_ || !knows(header.sender)) return;
  const Key key{header.sender, header.key};
  const auto it = posted_.find(key);
  if (it == posted_.end()) {
    arrivals_[key] = {{data, data + nbytes}, nullptr, nbytes, nullptr};
    return;
  }
  Posted posted = std::move(it->second);
  posted_.erase(it);
  std::memcpy(posted.data, data, static_cast<size_t>(std::min(nbytes, posted.nbytes)));
  end_locked(header.sender, std::move(posted.message), mismatch(nbytes, posted.nbytes));
  matched_locked(header.sender);
}

void GroupTransport::announced_locked(const DataHeader& header, void* descriptor, int64_t nbytes,
                                      Worker& worker) {
  if (aborted_ || !knows(header.sender)) {
    std::string why;
    if (knows(header.sender) && link_locked(header.sender, plane_->rail_of(worker), &why)) {
      say_leave_locked(peer_at(header.sender));
    }
    plane_->release_locked(worker, descriptor);
    return;
  }
  const Key key{header.sender, header.key};
  const auto it = posted_.find(key);
  if (it == posted_.end()) {
    arrivals_[key] = {{}, descriptor, nbytes, &worker};
    return;
  }
  Posted posted = std::move(it->second);
  posted_.erase(it);
  receive_locked(header.sender, std::move(posted), descriptor, worker);
}

void GroupTransport::receive_locked(int peer, Posted posted, void* descriptor, Worker& worker) {
  std::string why;
  auto flight = std::make_unique<Flight>();
  flight->group = this;
  flight->peer = peer;
  flight->link = link_locked(peer, plane_->rail_of(worker), &why);
  flight->message = std::move(posted.message);
  if (!flight->link) {
    plane_->release_locked(worker, descriptor);
    return end_locked(peer, std::move(flight->message), TransportError(Cause::Closed, why));
  }
  plane_->receive_locked(std::move(flight), descriptor, posted.data, posted.nbytes);
}

// Says now and then that small messages have been taken.
void GroupTransport::matched_locked(int peer) {
  int32_t& taken = peer_at(peer).taken;
  if (++taken < kCredits / 2) return;
  std::string why;
  auto flight = std::make_unique<Flight>();
  flight->link = link_locked(peer, 0, &why);
  if (!flight->link) return;
  flight->group = this;
  flight->peer = peer;
  flight->header = CreditHeader{id_, rank_, std::exchange(taken, 0)};
  plane_->send_locked(std::move(flight), nullptr, 0, true);
}

void GroupTransport::credit_locked(const CreditHeader& header) {
  if (!knows(header.sender)) return;
  int32_t& credit = peer_at(header.sender).credits;
  credit = std::clamp(credit + header.count, 0, kCredits);
}

void GroupTransport::lost_locked(uint64_t process, const std::string& why) {
  for (size_t peer = 0; peer < members_.size(); ++peer) {
    if (members_[peer].process != process) continue;
    lose_locked(peers_[peer], why);
    // Of large messages only the announcement is here.
    std::erase_if(arrivals_, [&](const auto& entry) {
      return entry.first.sender == static_cast<int32_t>(peer) && entry.second.descriptor;
    });
  }
}

// Nothing more comes from this peer, and what goes there is not taken.
void GroupTransport::lose_locked(Peer& peer, const std::string& why) {
  if (!peer.lost.empty()) return;
  peer.lost = why;
  peer.leaves = TimePoint::max();
  const TransportError error(Cause::Closed, why);
  for (auto it = posted_.begin(); it != posted_.end();) {
    if (it->first.sender == peer.rank) {
      end_locked(peer.rank, std::move(it->second.message), error);
      it = posted_.erase(it);
    } else {
      ++it;
    }
  }
  for (auto& message : std::exchange(peer.dropped, {})) end_locked(peer.rank, std::move(message), error);
}

// That this rank takes no more messages of the group: UCX acknowledges to a sender also what was dropped.
void GroupTransport::say_leave_locked(Peer& peer) {
  const auto links = plane_->links_to_locked(members_[static_cast<size_t>(peer.rank)].process);
  if (links.empty() || std::exchange(peer.told, true)) return;
  for (const auto& link : links) {
    auto flight = std::make_unique<Flight>();
    flight->group = this;
    flight->peer = peer.rank;
    flight->link = link;
    flight->header = LeaveHeader{id_, rank_, static_cast<int32_t>(links.size())};
    plane_->send_locked(std::move(flight), nullptr, 0, true);
  }
}

void GroupTransport::left_locked(const LeaveHeader& header) {
  if (!knows(header.sender)) return;
  Peer& peer = peer_at(header.sender);
  if (++peer.left_rails != header.rails || !peer.lost.empty()) return;
  peer.leaves = Clock::now() + kLeaveGrace;
  plane_->due_locked(peer.leaves);
}

TimePoint GroupTransport::due_locked() const {
  TimePoint due = busy_until_;
  for (const Peer& peer : peers_) due = std::min(due, peer.leaves);
  return due;
}

void GroupTransport::look_locked(TimePoint now) {
  if (busy_until_ <= now) close_busy_locked();
  for (Peer& peer : peers_) {
    if (peer.leaves <= now) lose_locked(peer, "the peer has left the group");
  }
}

void GroupTransport::ended_locked(Flight* flight, ucs_status_t status) {
  flights_.erase(flight);
  const std::unique_ptr<Flight> owned(flight);
  if (!owned->message) return;
  std::optional<TransportError> error;
  Peer& peer = peer_at(owned->peer);
  if (status == UCS_OK && owned->sends && !aborted_ && peer.leaves != TimePoint::max()) {
    peer.dropped.push_back(std::move(owned->message));
    return;
  }
  if (status == UCS_OK && owned->sends && !aborted_ && !peer.lost.empty()) {
    error.emplace(Cause::Closed, peer.lost);
  } else if (status != UCS_OK && aborted_) {
    error = kAborted;
  } else if (status != UCS_OK) {
    const std::string& why = owned->link->failure;
    error.emplace(Cause::Closed, why.empty() ? plane_->api().ucs_status_string(status) : why);
  }
  end_locked(owned->peer, std::move(owned->message), std::move(error));
}

void GroupTransport::end_locked(int peer, std::unique_ptr<Message> message,
                                std::optional<TransportError> error) {
  ++untold_;
  plane_->queue_locked({this, std::move(message), peer, std::move(error)});
}

void GroupTransport::told_locked() { --untold_; }

void GroupTransport::drive(const std::function<bool()>& done, TimePoint limit) {
  if (!plane_->foreign()) plane_->progress().drive(done, limit);
}

void GroupTransport::wake() noexcept { plane_->progress().wake(); }

// A link to a dead process ends within milliseconds, whether it was there before or is made now.
std::string GroupTransport::lost(int peer) {
  if (plane_->foreign() || peer == rank_) return {};
  std::string why;
  {
    const std::lock_guard lock(plane_->mutex());
    link_locked(peer, 0, &why);
  }
  plane_->progress().wake();
  return why;
}

void GroupTransport::abort() noexcept {
  if (plane_->foreign()) return;
  {
    const std::lock_guard lock(plane_->mutex());
    if (aborted_) return;
    aborted_ = true;
    for (auto& [key, posted] : posted_) end_locked(key.sender, std::move(posted.message), kAborted);
    posted_.clear();
    std::string why;
    for (const auto& [key, arrival] : arrivals_) {
      if (arrival.descriptor) link_locked(key.sender, plane_->rail_of(*arrival.worker), &why);
    }
    for (Peer& peer : peers_) {
      for (auto& message : std::exchange(peer.dropped, {})) end_locked(peer.rank, std::move(message), kAborted);
      say_leave_locked(peer);  // before anything is dropped
    }
    for (auto& [key, arrival] : arrivals_) {
      if (arrival.descriptor) plane_->release_locked(*arrival.worker, arrival.descriptor);
    }
    arrivals_.clear();
    if (!flights_.empty()) {
      busy_until_ = Clock::now() + kBusyGrace;
      plane_->due_locked(busy_until_);
    }
  }
  plane_->progress().wake();
}

// A receive that UCX is in the middle of cannot be taken back; it ends with its connection alone.
void GroupTransport::close_busy_locked() {
  busy_until_ = TimePoint::max();
  std::vector<std::shared_ptr<Link>> links;
  for (const Flight* flight : flights_) links.push_back(flight->link);
  for (const auto& link : links)
    plane_->break_locked(*link, "a peer did not answer within the limit of a call");
}

void GroupTransport::shutdown() {
  if (plane_->foreign() || shut_down_) return;
  shut_down_ = true;
  abort();
  std::unique_lock lock(plane_->mutex());
  plane_->progress().wait(lock, [this] { return flights_.empty() && untold_ == 0; });
  plane_->leave_locked(id_);
}

}  // namespace meshcast::ucx
