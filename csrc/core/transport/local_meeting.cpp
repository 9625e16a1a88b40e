#include "transport/local_meeting.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include "common/error.h"
#include "common/fault_point.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;

constexpr int kBacklog = 128;
constexpr int kSliceMs = 5;                         // between two checks whether to continue waiting
constexpr auto kLook = milliseconds(50);            // after which ranks that have not connected are checked
constexpr auto kSilence = std::chrono::seconds(2);  // after which a caller without a greeting is disconnected
constexpr size_t kMostCallers = 64;                 // without a greeting; another drops the first
constexpr size_t kSecretBytes = 32;                 // 128 bits, in hexadecimal

// First message on a link, in either direction. The protocol's own bytes follow.
struct Hello {
  uint32_t magic = 0;
  uint32_t bytes = 0;
  int32_t from = -1;
  int32_t to = -1;
  char secret[kSecretBytes] = {};  // of the rank that it is for
};

struct Caller {
  Descriptor socket;
  TimePoint since;
};

std::string name_of(const std::string& address) { return address.substr(0, address.find('/')); }

std::string secret_of(const std::string& address) {
  const size_t at = address.find('/');
  return at == std::string::npos ? "" : address.substr(at + 1);
}

// In constant time, which does not show how much of it is right.
bool same_secret(const char (&shown)[kSecretBytes], const std::string& secret) {
  if (secret.size() != kSecretBytes) return false;
  unsigned char unlike = 0;
  for (size_t i = 0; i < kSecretBytes; ++i) unlike |= static_cast<unsigned char>(shown[i] ^ secret[i]);
  return unlike == 0;
}

// Of a process, or of a connection on which nothing is sent.
bool ended(const Descriptor& what) {
  pollfd entry{what.get(), POLLIN, 0};
  return what.get() >= 0 && poll(&entry, 1, 0) > 0;
}

// One call of meet().
class Meeting {
 public:
  using Peer = LocalMeeting::Peer;

  Meeting(const std::map<int32_t, std::string>& addresses, int32_t rank, const LocalMeeting::Protocol& protocol,
          const std::function<LocalMeeting::Greeting(int32_t)>& greet, int listener)
      : addresses_(addresses), rank_(rank), protocol_(protocol), greet_(greet), listener_(listener) {
    for (const auto& [other, address] : addresses_) {
      if (other != rank_) missing_[other];
    }
  }

  std::vector<Peer> until(TimePoint deadline, const std::function<void()>& checkpoint) {
    for (;;) {
      // There is one link for each pair: this rank connects to lower ranks, and accepts from higher ones.
      const TimePoint now = Clock::now();
      for (auto& [other, state] : missing_) {
        if (other < rank_ && state.socket.get() < 0) call(other, state);
        if (other > rank_ && now - begin_ > kLook) look_after(other, state, now);
        if (ended(state.process)) gone(other);
      }
      if (missing_.empty()) break;
      wait();
      accept();
      hear();
      if (missing_.empty()) break;
      if (Clock::now() >= deadline)
        throw Error(
            ErrorKind::DeadlineExceeded,
            fmt::format("the ranks of this host did not connect for {} in time: rank {} of the group has "
                        "exited or is blocked elsewhere",
                        protocol_.purpose, missing_.begin()->first));
      checkpoint();
    }
    std::sort(peers_.begin(), peers_.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
    return std::move(peers_);
  }

 private:
  struct Missing {
    Descriptor socket;   // to a lower rank, which has not answered yet
    Descriptor held;     // to a higher rank, which has not called yet; without a greeting
    Descriptor process;  // as far as it is known and visible from here
    TimePoint looked;
  };

  [[noreturn]] void gone(int32_t other) const {
    ErrorContext context;
    context.peer = other;
    throw Error(ErrorKind::PeerLost,
                fmt::format("rank {} of the group on this host exited, or gave up, before "
                            "it had connected for {}",
                            other, protocol_.purpose),
                context);
  }

  // None if too many connections wait to be accepted there at present.
  Descriptor connect(int32_t other) const {
    Descriptor out = connect_to(name_of(addresses_.at(other)));
    if (out.get() < 0 && errno == ECONNREFUSED) gone(other);
    return out;
  }

  void call(int32_t other, Missing& state) {
    state.socket = connect(other);
    if (state.socket.get() < 0) return;
    state.process = process_behind(state.socket.get());
    if (!say(state.socket.get(), other)) state.socket = Descriptor();
  }

  // That rank has not called yet. Its listening socket shows that it has not given up: a connection to it is
  // held, and ends with it.
  void look_after(int32_t other, Missing& state, TimePoint now) {
    if (now - state.looked < kLook) return;
    state.looked = now;
    if (state.held.get() >= 0 && !ended(state.held)) return;
    state.held = connect(other);
    if (state.held.get() >= 0 && state.process.get() < 0) state.process = process_behind(state.held.get());
  }

  void wait() {
    std::vector<pollfd> entries{{listener_, POLLIN, 0}};
    for (const Caller& caller : callers_) entries.push_back({caller.socket.get(), POLLIN, 0});
    for (const auto& [other, state] : missing_) entries.push_back({state.socket.get(), POLLIN, 0});
    if (poll(entries.data(), entries.size(), kSliceMs) < 0 && errno != EINTR) fail_with_errno("poll");
  }

  void accept() {
    for (size_t count = 0; count < kMostCallers; ++count) {
      Descriptor socket = accept_from(listener_);
      if (socket.get() < 0) return;
      if (!of_this_user(socket.get())) continue;
      if (callers_.size() == kMostCallers) callers_.pop_front();
      callers_.push_back({std::move(socket), Clock::now()});
    }
  }

  void hear() {
    const TimePoint now = Clock::now();
    std::erase_if(callers_, [&](Caller& caller) {
      bool over = false;
      auto peer = receive(caller.socket, &over);
      // Missing until it has its answer: without one it calls again.
      if (peer && peer->rank > rank_ && say(peer->socket.get(), peer->rank)) met(std::move(*peer));
      return over || now - caller.since > kSilence;
    });
    for (const auto& [other, address] : addresses_) {
      const auto it = missing_.find(other);
      if (it == missing_.end()) continue;
      bool over = false;
      auto peer = receive(it->second.socket, &over);
      if (peer && peer->rank == other) {
        met(std::move(*peer));
      } else if (over) {
        it->second.socket = Descriptor();  // disconnected with unknown callers: call again
      }
    }
  }

  void met(Peer peer) {
    missing_.erase(peer.rank);
    peers_.push_back(std::move(peer));
  }

  bool say(int socket, int32_t other) const {
    MC_FAULT_POINT("greet");
    const LocalMeeting::Greeting greeting = greet_(other);
    Hello hello{protocol_.magic, static_cast<uint32_t>(protocol_.bytes), rank_, other, {}};
    const std::string secret = secret_of(addresses_.at(other));
    std::memcpy(hello.secret, secret.data(), std::min(secret.size(), sizeof hello.secret));
    std::array<iovec, 2> data{iovec{&hello, sizeof hello},
                              iovec{const_cast<std::byte*>(greeting.bytes.data()), greeting.bytes.size()}};
    alignas(cmsghdr) char control[CMSG_SPACE(LocalMeeting::kMostDescriptors * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = data.data();
    message.msg_iovlen = data.size();
    if (const size_t nbytes = greeting.descriptors.size() * sizeof(int)) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(nbytes);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(nbytes);
      std::memcpy(CMSG_DATA(header), greeting.descriptors.data(), nbytes);
    }
    const auto whole = static_cast<ssize_t>(sizeof hello + greeting.bytes.size());
    return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == whole;
  }

  // The greeting of a rank of the group. If none, `over`: the sender is no such rank, or has exited; not
  // `over`: nothing has arrived yet.
  std::optional<Peer> receive(Descriptor& socket, bool* over) const {
    if (socket.get() < 0) return std::nullopt;
    Hello hello;
    Peer out;
    out.bytes.resize(protocol_.bytes);
    std::array<iovec, 2> data{iovec{&hello, sizeof hello}, iovec{out.bytes.data(), out.bytes.size()}};
    alignas(cmsghdr) char control[CMSG_SPACE(LocalMeeting::kMostDescriptors * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = data.data();
    message.msg_iovlen = data.size();
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return std::nullopt;
    // This process owns these now, from any sender.
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
      if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= h->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(h) + at, sizeof fd);
        out.descriptors.emplace_back(fd);
      }
    }
    *over = true;
    if (got < static_cast<ssize_t>(sizeof hello)) return std::nullopt;
    if (!same_secret(hello.secret, secret_of(addresses_.at(rank_)))) return std::nullopt;
    if (hello.to != rank_ || !missing_.contains(hello.from)) return std::nullopt;
    if (hello.magic != protocol_.magic || hello.bytes != protocol_.bytes ||
        got != static_cast<ssize_t>(sizeof hello + protocol_.bytes) ||
        out.descriptors.size() != protocol_.descriptors)
      throw Error(
          ErrorKind::Generic,
          fmt::format("rank {} of the group on this host does not speak this protocol of {}: install one "
                      "version everywhere",
                      hello.from, protocol_.purpose));
    out.rank = hello.from;
    out.socket = std::move(socket);
    return out;
  }

  const std::map<int32_t, std::string>& addresses_;
  const int32_t rank_;
  const LocalMeeting::Protocol& protocol_;
  const std::function<LocalMeeting::Greeting(int32_t)>& greet_;
  const int listener_;
  const TimePoint begin_ = Clock::now();
  std::map<int32_t, Missing> missing_;
  std::deque<Caller> callers_;
  std::vector<Peer> peers_;
};

}  // namespace

LocalMeeting::LocalMeeting() {
  try {
    const std::string name = "meshcast-" + random_hexadecimal(kSecretBytes);
    listener_ = listen_at(name, kBacklog);
    close_in_children(listener_.get());
    address_ = name + '/' + random_hexadecimal(kSecretBytes);
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::Generic, fmt::format("no socket for the ranks of this host: {}", error.what()));
  }
}

LocalMeeting::~LocalMeeting() {
  if (origin_.foreign()) {
    listener_.release();  // it is closed, or the number is another's by now
  } else {
    stop_listening();
  }
}

void LocalMeeting::stop_listening() {
  if (listener_.get() >= 0) keep_in_children(listener_.get());
  listener_ = Descriptor();
}

std::vector<LocalMeeting::Peer> LocalMeeting::meet(const std::map<int32_t, std::string>& addresses,
                                                   int32_t rank, const Protocol& protocol,
                                                   const std::function<Greeting(int32_t)>& greet,
                                                   TimePoint deadline,
                                                   const std::function<void()>& checkpoint) {
  try {
    auto out = Meeting(addresses, rank, protocol, greet, listener_.get()).until(deadline, checkpoint);
    stop_listening();
    return out;
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::Generic, error.what());
  }
}

}  // namespace meshcast
