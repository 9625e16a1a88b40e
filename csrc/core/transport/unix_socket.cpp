#include "transport/unix_socket.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

namespace meshcast {
namespace {

constexpr int64_t kCheckMs = 50;  // between two checks of who waits

socklen_t abstract_address(const std::string& name, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  if (name.empty() || name.size() >= kSocketNameBytes) throw std::runtime_error("bad address of a peer");
  // The leading zero byte is what makes the name abstract.
  std::memcpy(out->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

ucred credentials(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) fail_with_errno("SO_PEERCRED");
  return peer;
}

void check_user(int socket) {
  if (credentials(socket).uid != geteuid())
    throw std::runtime_error("a peer's process belongs to another user");
}

}  // namespace

void fail_with_errno(const std::string& what) {
  throw std::runtime_error(what + ": " + std::generic_category().message(errno));
}

std::string random_socket_name() {
  uint8_t bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail_with_errno("getrandom");
  std::string out = "meshcast-";
  for (const uint8_t byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

Descriptor listen_at(const std::string& name, int backlog) {
  Descriptor out(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (out.get() < 0) fail_with_errno("socket");
  sockaddr_un address;
  const socklen_t size = abstract_address(name, &address);
  if (bind(out.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) fail_with_errno("bind");
  if (listen(out.get(), backlog) != 0) fail_with_errno("listen");
  return out;
}

Descriptor connect_to(const std::string& name, const std::string& who) {
  Descriptor out(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (out.get() < 0) fail_with_errno("socket");
  sockaddr_un address;
  const socklen_t size = abstract_address(name, &address);
  if (connect(out.get(), reinterpret_cast<sockaddr*>(&address), size) != 0)
    fail_with_errno("connecting to " + who);
  check_user(out.get());
  return out;
}

Descriptor accept_from(int listener) {
  Descriptor out(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (out.get() < 0) fail_with_errno("accept");
  check_user(out.get());
  return out;
}

void wait_readable(int fd, TimePoint deadline, const char* what, const std::function<void()>& check) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) throw std::runtime_error(std::string("timed out while ") + what);
    pollfd entry{fd, POLLIN, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, check ? kCheckMs : 60000)));
    if (ready > 0) return;
    if (ready == 0 && check) check();
    if (ready < 0 && errno != EINTR) fail_with_errno("poll");
  }
}

Descriptor process_behind(int socket) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials(socket).pid, 0)));
}

}  // namespace meshcast
