#pragma once

#include <cerrno>

#include <sys/eventfd.h>
#include <unistd.h>

namespace meshcast {

// Whether this process can open no more file descriptors. Asked after a failure: a connection that fails for
// this reason does not show that the peer is lost.
inline bool out_of_descriptors() {
  const int probe = eventfd(0, EFD_CLOEXEC);
  if (probe < 0) return errno == EMFILE || errno == ENFILE;
  close(probe);
  return false;
}

inline constexpr const char* kOutOfDescriptors =
    "this process can open no more file descriptors. Raise its limit (ulimit -n, or LimitNOFILE), or close "
    "some";

}  // namespace meshcast
