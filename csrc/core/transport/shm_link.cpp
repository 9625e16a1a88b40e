#include "transport/shm_link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/unix_socket.h"

namespace meshcast {
namespace {

constexpr uint32_t kHelloMagic = 0x6d636832;
constexpr int kBacklog = static_cast<int>(kMaxLocalRanks);
constexpr size_t kPassed = 2;  // descriptors of a hello: the group's memory, the process's bell

// First and only message on a link, in either direction; the sender's descriptors travel with it.
struct Hello {
  uint32_t magic = kHelloMagic;
  int32_t from = -1;
  int32_t to = -1;
  uint32_t group = 0;                   // its number on the sender's bell
  char address[kSocketNameBytes] = {};  // of the rank that was connected to: a stray process does not know it
};

using Passed = std::array<Descriptor, kPassed>;

void send_hello(int socket, const Hello& hello, std::array<int, kPassed> passed) {
  iovec data{const_cast<Hello*>(&hello), sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof passed)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof passed);
  std::memcpy(CMSG_DATA(header), passed.data(), sizeof passed);
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
    fail_with_errno("passing shared memory");
}

// Returns the descriptors that came along.
Passed receive_hello(int socket, Hello* hello, TimePoint deadline, const std::function<void()>& check) {
  wait_readable(socket, deadline, "waiting for a peer's shared memory", check);
  iovec data{hello, sizeof *hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int[kPassed]))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  Passed passed;
  size_t count = 0;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    const size_t here = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < here; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
      Descriptor owned(fd);
      if (count < kPassed) passed[count++] = std::move(owned);
    }
  }
  if (got != static_cast<ssize_t>(sizeof *hello) || hello->magic != kHelloMagic || count != kPassed) {
    throw std::runtime_error("a peer closed its connection or does not speak this protocol");
  }
  hello->address[sizeof hello->address - 1] = 0;
  return passed;
}

Hello make_hello(int from, int to, uint32_t group, const std::string& listener) {
  Hello hello;
  hello.group = group;
  hello.from = from;
  hello.to = to;
  std::memcpy(hello.address, listener.data(), listener.size());
  return hello;
}

}  // namespace

ShmLink::ShmLink(int rank, int socket, std::unique_ptr<ShmRegion> region, ShmBell bell, uint32_t group)
    : rank_(rank),
      socket_(socket),
      process_(process_behind(socket).release()),
      region_(std::move(region)),
      bell_(std::move(bell)),
      group_(group) {}

ShmLink::~ShmLink() {
  close(socket_);
  if (process_ >= 0) close(process_);
}

bool ShmLink::gone() const {
  // Nothing is sent on a link after the hello: whatever there is to read is its end.
  pollfd entries[] = {{socket_, POLLIN | POLLRDHUP, 0}, {process_, POLLIN, 0}};
  return poll(entries, 2, 0) > 0;
}

void ShmLink::hang_up() const { ::shutdown(socket_, SHUT_RDWR); }

ShmRendezvous::ShmRendezvous(uint32_t ranks, std::shared_ptr<ShmProgress> progress)
    : address_(random_socket_name()),
      place_(std::make_unique<ShmProgress::Place>(std::move(progress))),
      own_(ShmRegion::create(std::min(ranks, kMaxLocalRanks) - 1)) {
  listener_ = listen_at(address_, kBacklog).release();
}

ShmRendezvous::~ShmRendezvous() { close(listener_); }

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
  const std::array<int, kPassed> passed{out.own->fd(), out.place->progress().bell().fd()};
  const uint32_t group = out.place->number();
  const auto link_to = [&](const Hello& hello, Descriptor socket, const Passed& got) {
    return std::make_unique<ShmLink>(hello.from, socket.release(), ShmRegion::open(got[0].get(), count - 1),
                                     ShmBell(got[1].get()), hello.group);
  };
  // A link exists once for each pair: to a lower rank this one connects, from a higher one it accepts. What a
  // rank does first depends on nobody, so no cycle of ranks can wait for each other.
  std::vector<Descriptor> sockets;
  for (const ShmMember& member : members) {
    if (member.rank >= rank) break;
    Descriptor link = connect_to(member.address, "rank " + std::to_string(member.rank) + " on this host");
    send_hello(link.get(), make_hello(rank, member.rank, group, member.address), passed);
    sockets.push_back(std::move(link));
  }
  std::vector<std::unique_ptr<ShmLink>> higher;
  while (higher.size() < count - 1 - my_index) {
    wait_readable(listener_, deadline, "waiting for the other ranks of this host", check);
    Descriptor link = accept_from(listener_);
    Hello hello;
    const Passed got = receive_hello(link.get(), &hello, deadline, check);
    if (hello.to != rank || address_ != hello.address) throw std::runtime_error("a stray process called");
    send_hello(link.get(), make_hello(rank, hello.from, group, address_), passed);
    higher.push_back(link_to(hello, std::move(link), got));
  }
  for (size_t i = 0; i < sockets.size(); ++i) {
    Hello hello;
    const Passed got = receive_hello(sockets[i].get(), &hello, deadline, check);
    if (hello.from != members[i].rank || hello.to != rank) throw std::runtime_error("a stray process answered");
    out.links.push_back(link_to(hello, std::move(sockets[i]), got));
  }
  std::sort(higher.begin(), higher.end(), [](const auto& a, const auto& b) { return a->rank() < b->rank(); });
  for (size_t i = 0; i < higher.size(); ++i) {
    if (higher[i]->rank() != members[my_index + 1 + i].rank) throw std::runtime_error("a stray process called");
    out.links.push_back(std::move(higher[i]));
  }
  // A region has a mailbox for everybody but its owner: ranks above the owner move down by one.
  for (uint32_t i = 0; i < count; ++i) {
    if (i != my_index) out.mailbox.push_back(my_index < i ? my_index : my_index - 1);
  }
  out.own->close_fd();
  return out;
}

}  // namespace meshcast
