#pragma once

#include <cstddef>

#include "common/forks.h"

namespace meshcast {

// Memory without a name that processes share: a sealed memfd, mapped. Nothing of it is left once the processes
// that map it have ended, in any way. A forked child does not have it. Throws std::runtime_error.
class ShmMapping {
 public:
  ShmMapping() = default;
  // `name` shows in /proc/PID/maps. Reserves all of it at once, so that a lack of memory shows here and not as
  // a signal later.
  ShmMapping(const char* name, size_t nbytes);
  // The memory of a peer, which has to hold `least` bytes. Does not close `fd`.
  ShmMapping(int fd, size_t least);
  ~ShmMapping();
  ShmMapping(ShmMapping&& other) noexcept;
  ShmMapping& operator=(ShmMapping&& other) noexcept;

  void* base() const { return base_; }
  size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }  // of memory made here, until close_fd()
  void close_fd();

 private:
  void map(int fd);

  void* base_ = nullptr;
  Origin origin_;  // of the process that mapped it
  size_t nbytes_ = 0;
  int fd_ = -1;
};

}  // namespace meshcast
