#include "ucx/group_transport.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "common/descriptors.h"
#include "common/error.h"
#include "ucx/process_plane.h"

namespace meshcast::ucx {
namespace {

using Cause = TransportError::Cause;

// Peers that are alive receive sends that UCX has begun within this time.
constexpr auto kBusyGrace = std::chrono::milliseconds(500);
// A rank that leaves because the group has failed there may report the cause through the store alone, if it had
// no time for more. The store gets this head start.
constexpr auto kLeaveGrace = std::chrono::milliseconds(300);
constexpr size_t kMostOfCause = 2048;  // bytes of it that are sent

}  // namespace

GroupTransport::GroupTransport(std::shared_ptr<ProcessPlane> plane, uint64_t id, std::vector<Address> members,
                               int rank, std::vector<int32_t> first_rail)
    : plane_(std::move(plane)),
      id_(id),
      members_(std::move(members)),
      rank_(rank),
      first_rail_(std::move(first_rail)),
      peers_(members_.size()) {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    peers_[peer].rank = static_cast<int>(peer);
    peers_[peer].credit = kCreditBytes;
  }
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

void GroupTransport::say_locked(const std::shared_ptr<Link>& link, int peer, Kind kind, Header header,
                                std::string text) {
  auto flight = std::make_unique<Flight>();
  flight->group = this;
  flight->link = link;
  flight->peer = peer;
  flight->kind = kind;
  flight->header = header;
  flight->text = std::move(text);
  const std::string& said = flight->text;  // stays where it is, as the flight does
  const void* data = said.empty() ? nullptr : said.data();
  const auto nbytes = static_cast<int64_t>(said.size());
  plane_->send_locked(std::move(flight), data, nbytes);
}

std::optional<TransportError> GroupTransport::mismatch(int64_t nbytes, int64_t expected) {
  if (nbytes == expected) return std::nullopt;
  return TransportError(Cause::Mismatch,
                        fmt::format("a message of {} bytes met a receive of {}", nbytes, expected));
}

void GroupTransport::arrived_locked(Kind kind, const Header& header, const std::byte* data, int64_t nbytes) {
  if (!knows(header.sender)) return;
  Peer& peer = peer_at(header.sender);
  if (aborted_) {
    // These peers wait for this rank, but it may never have connected with them, so that they were not
    // notified.
    std::string why;
    const bool waits = kind == Kind::Announce || kind == Kind::Post ||
                       (kind == Kind::Data && header.count == 1 && header.nbytes > kSmallBytes);
    if (waits && link_for_locked(header.sender, header.key, rank_, &why)) say_leave_locked(peer);
    return;
  }
  switch (kind) {
    case Kind::Data: return data_locked(header, data, nbytes);
    case Kind::Announce: return announced_locked(header);
    case Kind::Post: return post_arrived_locked(header);
    case Kind::Taken: return taken_locked(header);
    case Kind::Credit: peer.credit = std::clamp<int64_t>(peer.credit + header.count, 0, kCreditBytes); return;
    case Kind::Leave: return left_locked(header, data, nbytes);
  }
}

void GroupTransport::lost_locked(uint64_t process, const std::string& why) {
  for (size_t peer = 0; peer < members_.size(); ++peer) {
    if (members_[peer].process == process) lose_locked(peers_[peer], why);
  }
}

// Nothing more comes from this peer except what is here, and messages to it are not taken.
void GroupTransport::lose_locked(Peer& peer, const std::string& why) {
  if (!peer.lost.empty()) return;
  peer.lost = why;
  peer.leaves = TimePoint::max();
  const TransportError error(Cause::Closed, why, peer.cause);
  for (auto it = receivings_.begin(); it != receivings_.end();) {
    if (it->first.peer == peer.rank) {
      end_locked(peer.rank, std::move(it->second.message), error);
      it = receivings_.erase(it);
    } else {
      ++it;
    }
  }
  for (auto it = probes_.begin(); it != probes_.end();) {
    if (it->first.peer == peer.rank) {
      end_locked(peer.rank, std::move(it->second), error);
      it = probes_.erase(it);
    } else {
      ++it;
    }
  }
  std::erase_if(arrivals_,
                [&](const auto& each) { return each.first.peer == peer.rank && each.second.announced; });
  std::erase_if(posts_, [&](const auto& each) { return each.first.peer == peer.rank; });
  std::vector<std::shared_ptr<Sending>> sendings;
  for (const auto& [key, sending] : sendings_) {
    if (key.peer == peer.rank) sendings.push_back(sending);
  }
  for (const auto& sending : sendings) give_up_locked(sending, error);
}

void GroupTransport::say_leave_locked(Peer& peer) {
  const auto links = plane_->links_to_locked(members_[static_cast<size_t>(peer.rank)].process);
  if (links.empty() || std::exchange(peer.told, true)) return;
  const auto count = static_cast<int32_t>(links.size());
  for (const auto& link : links)
    say_locked(link, peer.rank, Kind::Leave, {id_, 0, rank_, count, 0, 0}, leaves_because_);
}

// A rank that sends the cause needs no head start for it.
void GroupTransport::left_locked(const Header& header, const std::byte* text, int64_t nbytes) {
  Peer& peer = peer_at(header.sender);
  if (peer.cause.empty() && nbytes > 0) {
    peer.cause.assign(reinterpret_cast<const char*>(text), static_cast<size_t>(nbytes));
    anybody_told_ = true;
  }
  if (++peer.left_rails != header.count || !peer.lost.empty()) return;
  peer.leaves = Clock::now() + (peer.cause.empty() ? kLeaveGrace : std::chrono::milliseconds(0));
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

void GroupTransport::end_locked(int peer, std::unique_ptr<Message> message,
                                std::optional<TransportError> error) {
  ++untold_;
  plane_->queue_locked(End{this, std::move(message), peer, std::move(error)});
}

void GroupTransport::told_locked() { --untold_; }

Source* GroupTransport::source() noexcept { return plane_.get(); }

// A link to a dead process ends within milliseconds, whether it was there before or is made now.
std::string GroupTransport::lost(int peer) {
  if (plane_->foreign() || peer == rank_) return {};
  std::string why;
  {
    const std::lock_guard lock(plane_->mutex());
    link_locked(peer, 0, &why);
  }
  plane_->wake();
  return out_of_descriptors() ? std::string() : why;
}

void GroupTransport::leave_because(const std::string& why) noexcept {
  if (plane_->foreign()) return;
  const std::lock_guard lock(plane_->mutex());
  if (!aborted_ && leaves_because_.empty()) leaves_because_ = why.substr(0, kMostOfCause);
}

std::string GroupTransport::told(int peer) {
  if (plane_->foreign()) return {};
  const std::lock_guard lock(plane_->mutex());
  return peer_at(peer).cause;
}

void GroupTransport::abort() noexcept {
  if (plane_->foreign()) return;
  {
    const std::lock_guard lock(plane_->mutex());
    abort_locked();
  }
  plane_->wake();
}

void GroupTransport::abort_locked() {
  if (std::exchange(aborted_, true)) return;
  for (auto& [key, receiving] : std::exchange(receivings_, {})) {
    end_locked(key.peer, std::move(receiving.message), kAborted);
  }
  for (auto& [key, probe] : std::exchange(probes_, {})) end_locked(key.peer, std::move(probe), kAborted);
  for (const auto& [key, sending] : std::unordered_map(sendings_)) give_up_locked(sending, kAborted);
  // This includes peers that wait for this rank and with which it has not connected.
  std::string why;
  for (const auto& [key, arrival] : std::exchange(arrivals_, {})) {
    if (arrival.announced || arrival.nbytes > kSmallBytes) link_for_locked(key.peer, key.key, key.peer, &why);
  }
  for (const auto& [key, nbytes] : std::exchange(posts_, {})) link_for_locked(key.peer, key.key, rank_, &why);
  for (Peer& peer : peers_) say_leave_locked(peer);
  if (!flights_.empty()) {
    busy_until_ = Clock::now() + kBusyGrace;
    plane_->due_locked(busy_until_);
  }
}

// A send that UCX has begun cannot be taken back; it ends only with its connection.
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
  plane_->wait(lock, [this] { return flights_.empty() && untold_ == 0; });
  // Nothing moves any longer where the process ends at this moment. Flights of UCX then end after this group
  // has ended, and are not reported; those that have ended are reported here.
  for (Flight* flight : flights_) flight->group = nullptr;
  flights_.clear();
  while (untold_ > 0) {
    lock.unlock();
    plane_->tell();
    std::this_thread::yield();  // another thread may be at it
    lock.lock();
  }
  plane_->leave_locked(id_);
}

}  // namespace meshcast::ucx
