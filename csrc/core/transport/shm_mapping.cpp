#include "transport/shm_mapping.h"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "transport/unix_socket.h"

namespace meshcast {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

ShmMapping::ShmMapping(const char* name, size_t nbytes) : nbytes_(nbytes) {
  Descriptor memory(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) fail_with_errno("memfd_create");
  if (const int error = posix_fallocate(memory.get(), 0, static_cast<off_t>(nbytes))) {
    errno = error;
    fail_with_errno("reserving " + std::to_string(nbytes) + " bytes of shared memory");
  }
  // No peer can cut the memory short under the others, which would end them with SIGBUS.
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) fail_with_errno("sealing shared memory");
  map(memory.get());
  fd_ = memory.release();
}

ShmMapping::ShmMapping(int fd, size_t least) {
  struct stat status {};
  if (fstat(fd, &status) != 0) fail_with_errno("shared memory of a peer");
  if ((fcntl(fd, F_GET_SEALS) & kSeals) != kSeals) throw std::runtime_error("a peer's memory is not sealed");
  nbytes_ = static_cast<size_t>(status.st_size);
  if (nbytes_ < least) throw std::runtime_error("a peer's shared memory is too small");
  map(fd);
}

void ShmMapping::map(int fd) {
  void* base = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail_with_errno("mapping shared memory");
  base_ = base;
  // A forked child (a data loader's worker) has no part in this and must not keep the memory alive.
  madvise(base, nbytes_, MADV_DONTFORK);
}

ShmMapping::~ShmMapping() {
  // In a forked child something else may lie there.
  if (base_ && !origin_.foreign()) munmap(base_, nbytes_);
  close_fd();
}

ShmMapping::ShmMapping(ShmMapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      origin_(other.origin_),
      nbytes_(std::exchange(other.nbytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

ShmMapping& ShmMapping::operator=(ShmMapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(origin_, other.origin_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

void ShmMapping::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

}  // namespace meshcast
