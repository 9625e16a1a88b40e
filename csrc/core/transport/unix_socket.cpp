#include "transport/unix_socket.h"

#include <cerrno>
#include <cstddef>
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

socklen_t abstract_address(const std::string& name, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof out->sun_path) throw std::runtime_error("bad address of a peer");
  // The leading zero byte is what makes the name abstract.
  std::memcpy(out->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Descriptor new_socket() {
  Descriptor out(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (out.get() < 0) fail_with_errno("socket");
  return out;
}

bool credentials(int socket, ucred* peer) {
  socklen_t size = sizeof *peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, peer, &size) == 0;
}

}  // namespace

void fail_with_errno(const std::string& what) {
  throw std::runtime_error(what + ": " + std::generic_category().message(errno));
}

std::string random_hexadecimal(size_t digits) {
  std::string out(digits, 0);
  if (getrandom(out.data(), digits, 0) != static_cast<ssize_t>(digits)) fail_with_errno("getrandom");
  for (char& digit : out) digit = "0123456789abcdef"[digit & 15];
  return out;
}

Descriptor listen_at(const std::string& name, int backlog) {
  Descriptor out = new_socket();
  sockaddr_un address;
  const socklen_t size = abstract_address(name, &address);
  if (bind(out.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) fail_with_errno("bind");
  if (listen(out.get(), backlog) != 0) fail_with_errno("listen");
  return out;
}

Descriptor connect_to(const std::string& name) {
  Descriptor out = new_socket();
  sockaddr_un address;
  const socklen_t size = abstract_address(name, &address);
  if (connect(out.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    const int error = errno;
    if (error != EAGAIN && error != ECONNREFUSED) fail_with_errno("connecting to a rank of this host");
    out = Descriptor();
    errno = error;
    return out;
  }
  if (!of_this_user(out.get())) throw std::runtime_error("a peer's process belongs to another user");
  return out;
}

Descriptor accept_from(int listener) {
  Descriptor out(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (out.get() < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED)
    fail_with_errno("accept");
  return out;
}

bool of_this_user(int socket) {
  ucred peer{};
  return credentials(socket, &peer) && peer.uid == geteuid();
}

Descriptor process_behind(int socket) {
  ucred peer{};
  if (!credentials(socket, &peer)) return Descriptor();
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

}  // namespace meshcast
