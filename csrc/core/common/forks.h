#pragma once

#include <cstdint>

namespace meshcast {

// A forked child (a data loader's worker, say) has a copy of everything but the threads, and shares the
// sockets. What its parent made is therefore not its own: it must not use, wait for or close any of it, and
// locks may be held there by threads that it does not have.

uint32_t forks() noexcept;  // from the first process to this one, as far as this library was loaded

// Remembers which process made what has it as a member.
class Origin {
 public:
  Origin() noexcept {}                                         // not defaulted: Clang wants that for constants
  bool foreign() const noexcept { return forks_ != forks(); }  // this is a forked child of that process
  void check() const;                                          // throws Error where foreign()

 private:
  uint32_t forks_ = forks();
};

// A forked child closes this descriptor at once: an open copy there would hide from peers that its parent has
// died.
void close_in_children(int fd);
void keep_in_children(int fd);  // before it is closed here

// `step` runs in every forked child, before fork() returns there. It may make system calls and store to memory.
void in_children(void (*step)());

}  // namespace meshcast
