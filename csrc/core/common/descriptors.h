#pragma once

#include <cerrno>

#include <sys/eventfd.h>
#include <unistd.h>

namespace meshcast {

// Whether this process can open no more file descriptors, for one in which something failed that needs them: a
// connection that cannot be made says nothing of the peer then.
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
