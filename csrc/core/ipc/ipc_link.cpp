#include "ipc/ipc_link.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include "common/error.h"

namespace meshcast {
namespace {

constexpr int kBacklog = 128;
constexpr int kSliceMs = 5;  // between two looks at whether to go on waiting
// The process behind a socket is looked at now and then, since that costs a system call.
constexpr uint32_t kLooksPerProcess = 64;

static_assert(std::is_trivially_copyable_v<IpcNote>, "notes travel as they are");

// First message on a link, in either direction.
struct Hello {
  uint32_t magic = 0x6d636931;
  uint32_t note_bytes = sizeof(IpcNote);
  int32_t from = -1;
  int32_t to = -1;
  char address[kSocketNameBytes] = {};  // of the rank that was connected to: a stray process does not know it
  IpcCard card;
};

void send_hello(int socket, int32_t from, int32_t to, const std::string& address, const IpcCard& card) {
  Hello hello;
  hello.from = from;
  hello.to = to;
  std::memcpy(hello.address, address.data(), std::min(address.size(), kSocketNameBytes - 1));
  hello.card = card;
  if (::send(socket, &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
    fail_with_errno("telling a rank of this host about a GPU");
}

class Patience {
 public:
  Patience(TimePoint deadline, const std::function<void()>& checkpoint)
      : deadline_(deadline), checkpoint_(checkpoint) {}

  void until_readable(int fd) const {
    for (;;) {
      pollfd entry{fd, POLLIN, 0};
      const int ready = poll(&entry, 1, kSliceMs);
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) fail_with_errno("poll");
      if (Clock::now() >= deadline_)
        throw Error(ErrorKind::DeadlineExceeded,
                    "the ranks of this host did not connect over CUDA IPC in time: one of them has gone or is "
                    "stuck elsewhere");
      checkpoint_();
    }
  }

  Hello hello(int socket) const {
    until_readable(socket);
    Hello out;
    const ssize_t got = recv(socket, &out, sizeof out, 0);
    if (got <= 0) throw Error(ErrorKind::PeerLost, "a rank of this host closed its connection");
    if (got != static_cast<ssize_t>(sizeof out) || out.magic != Hello{}.magic ||
        out.note_bytes != sizeof(IpcNote))
      throw std::runtime_error("a peer does not speak this protocol: install one version everywhere");
    out.address[sizeof out.address - 1] = 0;
    return out;
  }

 private:
  const TimePoint deadline_;
  const std::function<void()>& checkpoint_;
};

}  // namespace

IpcLink::IpcLink(int32_t peer, Descriptor socket)
    : peer_(peer), socket_(std::move(socket)), process_(process_behind(socket_.get())) {}

bool IpcLink::send(const IpcNote& note) {
  const ssize_t sent = ::send(socket_.get(), &note, sizeof note, MSG_NOSIGNAL | MSG_DONTWAIT);
  // A peer that has gone is found when its notes are looked for.
  return sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ENOBUFS);
}

IpcLink::Got IpcLink::receive(IpcNote* note) {
  // Looked at before the socket, so that what the process said at the end is not taken for silence.
  pollfd process{process_.get(), POLLIN, 0};
  const bool ended = process_.get() >= 0 && looks_++ % kLooksPerProcess == 0 && poll(&process, 1, 0) > 0;
  ssize_t got = recv(socket_.get(), note, sizeof *note, MSG_DONTWAIT);
  // Said once where the peer closed before it had read everything; what it told before that is still there.
  if (got < 0 && errno == ECONNRESET) got = recv(socket_.get(), note, sizeof *note, MSG_DONTWAIT);
  if (got == static_cast<ssize_t>(sizeof *note)) return Got::Note;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    return ended ? Got::End : Got::Nothing;
  return Got::End;
}

void IpcLink::hang_up() const { ::shutdown(socket_.get(), SHUT_RDWR); }

IpcMeeting::IpcMeeting() : address_(random_socket_name()) {
  try {
    listener_ = listen_at(address_, kBacklog);
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::Generic, fmt::format("no socket for CUDA IPC: {}", error.what()));
  }
}

std::vector<IpcPeer> IpcMeeting::meet(const std::vector<std::string>& addresses, int32_t rank,
                                      const std::function<IpcCard(int32_t)>& card, TimePoint deadline,
                                      const std::function<void()>& checkpoint) {
  const auto count = static_cast<int32_t>(addresses.size());
  const auto name = [&](int32_t peer) { return addresses[static_cast<size_t>(peer)]; };
  const Patience patience(deadline, checkpoint);
  std::vector<IpcPeer> out;
  try {
    // As in ShmRendezvous: to a lower rank this one connects, from a higher one it accepts. What a rank does
    // first depends on nobody, so no cycle of ranks can wait for each other.
    std::vector<Descriptor> lower;
    for (int32_t peer = 0; peer < rank; ++peer) {
      lower.push_back(connect_to(name(peer), fmt::format("rank {} of the group on this host", peer)));
      send_hello(lower.back().get(), rank, peer, name(peer), card(peer));
    }
    while (out.size() < static_cast<size_t>(count - 1 - rank)) {
      patience.until_readable(listener_.get());
      Descriptor link = accept_from(listener_.get());
      const Hello hello = patience.hello(link.get());
      const bool known =
          std::any_of(out.begin(), out.end(), [&](const auto& p) { return p.link.peer() == hello.from; });
      if (hello.to != rank || hello.from <= rank || hello.from >= count || known || address_ != hello.address)
        throw std::runtime_error("a stray process called");
      send_hello(link.get(), rank, hello.from, address_, card(hello.from));
      out.push_back({IpcLink(hello.from, std::move(link)), hello.card});
    }
    for (int32_t peer = 0; peer < rank; ++peer) {
      Descriptor& link = lower[static_cast<size_t>(peer)];
      const Hello hello = patience.hello(link.get());
      if (hello.from != peer || hello.to != rank) throw std::runtime_error("a stray process answered");
      out.push_back({IpcLink(peer, std::move(link)), hello.card});
    }
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::Generic, error.what());
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.link.peer() < b.link.peer(); });
  listener_ = Descriptor();
  return out;
}

}  // namespace meshcast
