#include "ipc/ipc_link.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

namespace meshcast {
namespace {

// The process behind a socket is looked at now and then, since that costs a system call.
constexpr uint32_t kLooksPerProcess = 64;

static_assert(std::is_trivially_copyable_v<IpcNote> && std::is_trivially_copyable_v<IpcCard>,
              "notes and cards travel as they are");

// The ranks send each other their cards. The version of the protocol is the size of its notes.
constexpr LocalMeeting::Protocol kProtocol{0x6d636933 + (sizeof(IpcNote) << 8), sizeof(IpcCard), 0, "CUDA IPC"};

}  // namespace

IpcLink::IpcLink(int32_t peer, Descriptor socket)
    : peer_(peer), socket_(std::move(socket)), process_(process_behind(socket_.get())) {}

bool IpcLink::send(const IpcNote& note) {
  const ssize_t sent = ::send(socket_.get(), &note, sizeof note, MSG_NOSIGNAL | MSG_DONTWAIT);
  // receive() finds that a peer has exited.
  return sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ENOBUFS);
}

IpcLink::Got IpcLink::receive(IpcNote* note) {
  // Checked before the socket, so that the last notes of a process that has ended are read.
  pollfd process{process_.get(), POLLIN, 0};
  const bool ended = process_.get() >= 0 && looks_++ % kLooksPerProcess == 0 && poll(&process, 1, 0) > 0;
  ssize_t got = recv(socket_.get(), note, sizeof *note, MSG_DONTWAIT);
  // Returned once if the peer closed before it had read everything; its earlier notes are still there.
  if (got < 0 && errno == ECONNRESET) got = recv(socket_.get(), note, sizeof *note, MSG_DONTWAIT);
  if (got == static_cast<ssize_t>(sizeof *note)) return Got::Note;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    return ended ? Got::End : Got::Nothing;
  return Got::End;
}

void IpcLink::hang_up() const { ::shutdown(socket_.get(), SHUT_RDWR); }

void IpcLink::stop_sending() const { ::shutdown(socket_.get(), SHUT_WR); }

std::vector<IpcPeer> IpcMeeting::meet(const std::vector<std::string>& addresses, int32_t rank,
                                      const std::function<IpcCard(int32_t)>& card, TimePoint deadline,
                                      const std::function<void()>& checkpoint) {
  std::map<int32_t, std::string> by_rank;
  for (const std::string& address : addresses) by_rank.emplace(static_cast<int32_t>(by_rank.size()), address);
  std::map<int32_t, IpcCard> cards;  // one for each peer, however often it is sent
  const auto greet = [&](int32_t peer) {
    if (!cards.contains(peer)) cards.emplace(peer, card(peer));
    LocalMeeting::Greeting greeting{std::vector<std::byte>(sizeof(IpcCard)), {}};
    std::memcpy(greeting.bytes.data(), &cards.at(peer), sizeof(IpcCard));
    return greeting;
  };
  std::vector<IpcPeer> out;
  for (LocalMeeting::Peer& peer : meeting_.meet(by_rank, rank, kProtocol, greet, deadline, checkpoint)) {
    out.push_back({IpcLink(peer.rank, std::move(peer.socket)), {}});
    std::memcpy(&out.back().card, peer.bytes.data(), sizeof(IpcCard));
  }
  return out;
}

}  // namespace meshcast
