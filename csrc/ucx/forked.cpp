#include "ucx/forked.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/error.h"
#include "common/forks.h"

namespace meshcast::ucx {
namespace {

// In a forked child there may be no memory to be had: locks of other threads stay held. So all of this works
// with system calls and fixed arrays.

constexpr size_t kMostWorkers = 256;  // of a process: a rail each
constexpr size_t kMostInner = 64;     // of a worker: what it watches, which in turn watch the sockets

std::array<std::atomic<int>, kMostWorkers> workers;  // their descriptors plus one; 0: free
std::atomic<bool> forked_with_workers{false};

// "NAME" of "/proc/self/fdinfo/NAME"
void append_number(char* path, int fd) {
  char digits[12];
  size_t count = 0;
  do {
    digits[count++] = static_cast<char>('0' + fd % 10);
    fd /= 10;
  } while (fd > 0);
  path += std::strlen(path);
  while (count > 0) *path++ = digits[--count];
  *path = 0;
}

// visit(fd, inode) for each descriptor that an epoll watches; nothing for other descriptors.
template <typename Visit>
void watched_by(int epoll, const Visit& visit) {
  char path[64] = "/proc/self/fdinfo/";
  append_number(path, epoll);
  const int info = open(path, O_RDONLY | O_CLOEXEC);
  if (info < 0) return;
  char buffer[4096];
  size_t kept = 0;
  for (;;) {
    const ssize_t got = read(info, buffer + kept, sizeof(buffer) - 1 - kept);
    if (got <= 0) break;
    const size_t end = kept + static_cast<size_t>(got);
    buffer[end] = 0;
    char* line = buffer;
    while (char* newline = std::strchr(line, '\n')) {
      *newline = 0;
      // "tfd: 37 events: 19 data: 7f29a00d2040  pos:0 ino:6bd66f sdev:9"
      if (std::strncmp(line, "tfd:", 4) == 0) {
        const char* inode = std::strstr(line, "ino:");
        if (inode) visit(std::atoi(line + 4), std::strtoull(inode + 4, nullptr, 16));
      }
      line = newline + 1;
    }
    kept = static_cast<size_t>(buffer + end - line);
    if (kept >= sizeof(buffer) - 1) break;  // no line is so long
    std::memmove(buffer, line, kept);
  }
  close(info);
}

// An epoll may still name a descriptor that is another's by now.
void close_if(int fd, uint64_t inode) {
  struct stat found {};
  if (fstat(fd, &found) == 0 && found.st_ino == inode) close(fd);
}

struct Inner {
  int fd[kMostInner] = {};
  size_t count = 0;
  bool has(int other) const { return std::find(fd, fd + count, other) != fd + count; }
};

// UCX's own thread watches what its workers watch, and the sockets that listen.
void close_what_watches(const Inner& inner) {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  alignas(uint64_t) char entries[4096];
  for (;;) {
    const long got = syscall(SYS_getdents64, folder, entries, sizeof(entries));
    if (got <= 0) break;
    for (long at = 0; at < got;) {
      constexpr size_t kLength = 16;  // of linux_dirent64: where its length is, and its name
      constexpr size_t kName = 19;
      uint16_t length = 0;
      std::memcpy(&length, entries + at + kLength, sizeof(length));
      const char* name = entries + at + kName;
      at += length;
      if (*name < '0' || *name > '9') continue;
      const int fd = std::atoi(name);
      bool watches = false;
      watched_by(fd, [&](int each, uint64_t /*inode*/) { watches = watches || inner.has(each); });
      if (!watches) continue;
      watched_by(fd, [&](int each, uint64_t inode) {
        if (!inner.has(each)) close_if(each, inode);
      });
      close(fd);
    }
  }
  close(folder);
}

void in_child() {
  for (auto& slot : workers) {
    const int event_fd = slot.exchange(0) - 1;
    if (event_fd < 0) continue;
    forked_with_workers = true;
    Inner inner;
    watched_by(event_fd, [&](int each, uint64_t /*inode*/) {
      if (inner.count < kMostInner) inner.fd[inner.count++] = each;
    });
    close(event_fd);  // before the others, since it watches them
    close_what_watches(inner);
    for (size_t i = 0; i < inner.count; ++i) {
      watched_by(inner.fd[i], close_if);
      close(inner.fd[i]);
    }
  }
}

}  // namespace

void close_in_children_of(int event_fd) {
  [[maybe_unused]] static const bool once = (in_children(in_child), true);
  for (auto& slot : workers) {
    int free = 0;
    if (slot.compare_exchange_strong(free, event_fd + 1)) return;
  }
  throw Error(ErrorKind::Generic, "a process has too many rails");
}

void gone(int event_fd) {
  for (auto& slot : workers) {
    int mine = event_fd + 1;
    if (slot.compare_exchange_strong(mine, 0)) return;
  }
}

void refuse_in_children() {
  if (!forked_with_workers) return;
  throw Error(
      ErrorKind::Generic,
      "this process was forked from one that uses UCX, which does not work here; start processes by spawn, "
      "or set MESHCAST_TRANSPORT=gloo");
}

}  // namespace meshcast::ucx
