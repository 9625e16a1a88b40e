#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <unistd.h>

// Sockets between processes of one host, under names that have no file. They carry whole messages in order
// (SOCK_SEQPACKET) and close with their process. All functions throw std::runtime_error with the reason.
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

[[noreturn]] void fail_with_errno(const std::string& what);

std::string random_hexadecimal(size_t digits);  // from the kernel

// None of these blocks.
Descriptor listen_at(const std::string& name, int backlog);
// None, with errno: EAGAIN where too many wait to be accepted there, ECONNREFUSED where no process listens.
// Throws where a process of another user listens.
Descriptor connect_to(const std::string& name);
Descriptor accept_from(int listener);  // none where no connection waits
bool of_this_user(int socket);         // the process at the other end

// Readable once the process at the other end has ended; none where it is not visible from here. A child that
// it forked may hold the socket open after that.
Descriptor process_behind(int socket);

}  // namespace meshcast
