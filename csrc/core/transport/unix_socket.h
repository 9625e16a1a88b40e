#pragma once

#include <functional>
#include <string>
#include <utility>

#include <unistd.h>

#include "transport/transport.h"

// Sockets between processes of one host, under names that have no file and that nobody can guess. They carry
// whole messages in order (SOCK_SEQPACKET) and close with their process. All functions throw
// std::runtime_error with the reason.
namespace meshcast {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

inline constexpr size_t kSocketNameBytes = 64;  // with the zero behind it

[[noreturn]] void fail_with_errno(const std::string& what);

std::string random_socket_name();
Descriptor listen_at(const std::string& name, int backlog);
// `who` is there for the message. Blocks only while the backlog of the other end is full.
Descriptor connect_to(const std::string& name, const std::string& who);
// `listener` is readable. Of processes of this user only.
Descriptor accept_from(int listener);

// Throws where nothing can be read by `deadline`; `what` is being done meanwhile. check() is called now and
// then until then, and throws where waiting has lost its sense.
void wait_readable(int fd, TimePoint deadline, const char* what, const std::function<void()>& check = {});

// Readable once the process at the other end has ended; none where it is not visible from here. A child that
// it forked may hold the socket open after that.
Descriptor process_behind(int socket);

}  // namespace meshcast
