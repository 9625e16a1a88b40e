#pragma once

#include <cstdint>

namespace meshcast {

// A forked child (a data loader's worker, say) has a copy of everything except the threads, and shares the
// sockets. So it must not use, wait for or close any object of its parent, and threads that it does not have
// may hold their locks.

uint32_t forks() noexcept;  // from the first process with this library loaded to this one

// As a member, remembers which process made the object.
class Origin {
 public:
  Origin() noexcept {}                                         // not defaulted, as Clang requires for constants
  bool foreign() const noexcept { return forks_ != forks(); }  // called in a forked child of that process
  void check() const;                                          // throws Error if foreign()

 private:
  uint32_t forks_ = forks();
};

// A forked child closes this descriptor at once: an open copy there would hide from peers that its parent has
// died.
void close_in_children(int fd);
void keep_in_children(int fd);  // call before closing it here

// `step` runs in every forked child, before fork() returns there. It may make system calls and store to memory.
void in_children(void (*step)());

}  // namespace meshcast
