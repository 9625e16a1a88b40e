#include "transport/shm_link.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/unix_socket.h"

namespace meshcast {
namespace {

// Each rank sends its number on its own doorbell, with the memory of its group and its process's doorbell.
constexpr LocalMeeting::Protocol kProtocol{0x6d636834, sizeof(uint32_t), 1 + Doorbell::kFds, "shared memory"};

}  // namespace

ShmPeer::ShmPeer(int rank, int socket, std::shared_ptr<Doorbell> doorbell, uint32_t group)
    : rank_(rank),
      socket_(socket),
      process_(process_behind(socket).release()),
      doorbell_(std::move(doorbell)),
      group_(group) {
  close_in_children(socket_);
}

ShmPeer::~ShmPeer() {
  if (origin_.foreign()) return;  // they are closed, or the number is another's by now
  keep_in_children(socket_);
  close(socket_);
  if (process_ >= 0) close(process_);
}

bool ShmPeer::gone() const {
  // Nothing is sent on a link after the hello: anything to read is its end.
  pollfd entries[] = {{socket_, POLLIN | POLLRDHUP, 0}, {process_, POLLIN, 0}};
  return poll(entries, 2, 0) > 0;
}

void ShmPeer::hang_up() const { ::shutdown(socket_, SHUT_RDWR); }

std::vector<int> ShmPeer::fds() const {
  std::vector<int> out{socket_};
  if (process_ >= 0) out.push_back(process_);
  return out;
}

ShmRendezvous::ShmRendezvous(uint32_t ranks, std::shared_ptr<ShmProgress> progress)
    : place_(std::make_unique<ShmProgress::Place>(std::move(progress))),
      own_(ShmRegion::create(std::min(ranks, kMaxLocalRanks) - 1)) {}

ShmMembership ShmRendezvous::meet(const std::vector<ShmMember>& members, int rank, TimePoint deadline,
                                  const std::function<void()>& check) {
  const auto count = static_cast<uint32_t>(members.size());
  if (count > kMaxLocalRanks) {
    throw std::runtime_error(std::to_string(count) + " ranks of one host; shared memory serves at most " +
                             std::to_string(kMaxLocalRanks));
  }
  const auto mine = std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.rank == rank; });
  if (mine == members.end()) throw std::runtime_error("this rank is not among the ranks of its host");
  const auto my_index = static_cast<uint32_t>(mine - members.begin());

  ShmMembership out;
  out.rank = rank;
  out.place = std::move(place_);
  out.own = std::move(own_);
  std::map<int32_t, std::string> addresses;
  for (const ShmMember& member : members) addresses.emplace(member.rank, member.address);
  const auto greet = [&](int32_t) {
    const uint32_t group = out.place->number();
    LocalMeeting::Greeting greeting{std::vector<std::byte>(sizeof group),
                                    out.place->progress().doorbell().fds()};
    greeting.descriptors.push_back(out.own->fd());
    std::memcpy(greeting.bytes.data(), &group, sizeof group);
    return greeting;
  };
  for (LocalMeeting::Peer& peer : meeting_.meet(addresses, rank, kProtocol, greet, deadline, check)) {
    uint32_t group = 0;
    std::memcpy(&group, peer.bytes.data(), sizeof group);
    std::vector<int> doorbell;
    for (size_t i = 0; i < Doorbell::kFds; ++i) doorbell.push_back(peer.descriptors[i].get());
    auto region = ShmRegion::open(peer.descriptors[Doorbell::kFds].get(), count - 1);
    out.links.push_back(std::make_unique<ShmLink>(peer.rank, peer.socket.release(), std::move(region),
                                                  out.place->progress().doorbell_of_peer(doorbell), group));
  }
  // A region has a mailbox for every rank except its owner: ranks above the owner move down by one.
  for (uint32_t i = 0; i < count; ++i) {
    if (i != my_index) out.mailbox.push_back(my_index < i ? my_index : my_index - 1);
  }
  out.own->close_fd();
  return out;
}

}  // namespace meshcast
