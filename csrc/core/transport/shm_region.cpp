#include "transport/shm_region.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace meshcast {
namespace {

constexpr uint64_t kMagic = 0x6d63617374736d31;  // changes with the layout of ShmHeader
constexpr size_t kPage = 4096;
constexpr int64_t kLargest = int64_t{2} << 20;     // slots of one region: those of a few ranks fit into an L3
constexpr int64_t kSmallest = int64_t{512} << 10;  // below this, copying in pieces costs more than it saves
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::mutex budget_mutex;
int64_t budget_left = int64_t{64} << 20;
int64_t budget_total = budget_left;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::generic_category().message(errno));
}

// Many groups share the budget: each takes an eighth of what is left, so that later ones get less, not none.
int64_t take_budget() {
  const std::lock_guard lock(budget_mutex);
  const int64_t share = std::min(kLargest, budget_left / 8);
  if (share < kSmallest) {
    throw std::runtime_error("the shared memory that this process may use (" +
                             std::to_string(budget_total >> 20) + " MiB) is used up by its other groups");
  }
  const int64_t slot = share / kMaxSlots / static_cast<int64_t>(kPage) * static_cast<int64_t>(kPage);
  budget_left -= slot * kMaxSlots;
  return slot * kMaxSlots;
}

void return_budget(int64_t nbytes) {
  const std::lock_guard lock(budget_mutex);
  budget_left += nbytes;
}

constexpr size_t page_up(size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

constexpr size_t control_bytes(uint32_t members) {
  return page_up(sizeof(ShmHeader) + members * sizeof(ShmHeader::Mailbox));
}

}  // namespace

void set_shm_budget(int64_t nbytes) {
  const std::lock_guard lock(budget_mutex);
  budget_left += nbytes - budget_total;
  budget_total = nbytes;
}

std::unique_ptr<ShmRegion> ShmRegion::create(uint32_t members) {
  std::unique_ptr<ShmRegion> region(new ShmRegion);
  region->budget_ = take_budget();
  region->fd_ = memfd_create("meshcast", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (region->fd_ < 0) fail("memfd_create");
  const size_t nbytes = control_bytes(members) + static_cast<size_t>(region->budget_);
  if (const int error = posix_fallocate(region->fd_, 0, static_cast<off_t>(nbytes))) {
    errno = error;
    fail("reserving " + std::to_string(nbytes) + " bytes of shared memory");
  }
  // No peer can cut the memory short under the others, which would end them with SIGBUS.
  if (fcntl(region->fd_, F_ADD_SEALS, kSeals) != 0) fail("sealing shared memory");
  region->map(region->fd_, nbytes);
  auto* header = new (region->base_) ShmHeader;
  region->slots_ = header->slots = kMaxSlots;
  region->slot_bytes_ = header->slot_bytes = static_cast<uint32_t>(region->budget_ / kMaxSlots);
  region->members_ = header->members = members;
  auto* mailboxes = reinterpret_cast<ShmHeader::Mailbox*>(header + 1);
  for (uint32_t i = 0; i < members; ++i) new (mailboxes + i) ShmHeader::Mailbox;
  header->magic = kMagic;
  return region;
}

std::unique_ptr<ShmRegion> ShmRegion::open(int fd, uint32_t members) {
  struct stat status {};
  if (fstat(fd, &status) != 0) fail("shared memory of a peer");
  if ((fcntl(fd, F_GET_SEALS) & kSeals) != kSeals) throw std::runtime_error("a peer's memory is not sealed");
  const auto nbytes = static_cast<size_t>(status.st_size);
  if (nbytes < sizeof(ShmHeader)) throw std::runtime_error("a peer's shared memory is too small");
  std::unique_ptr<ShmRegion> region(new ShmRegion);
  region->map(fd, nbytes);
  const ShmHeader& header = region->header();
  region->slots_ = header.slots;
  region->slot_bytes_ = header.slot_bytes;
  region->members_ = header.members;
  const bool fits = header.magic == kMagic && region->members_ >= members &&
                    region->members_ < kMaxLocalRanks && region->slots_ <= kMaxSlots &&
                    control_bytes(region->members_) + size_t{region->slots_} * region->slot_bytes_ <= nbytes;
  if (!fits)
    throw std::runtime_error("a peer's shared memory has another form; is its meshcast another version?");
  return region;
}

void ShmRegion::map(int fd, size_t nbytes) {
  void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("mapping shared memory");
  base_ = base;
  nbytes_ = nbytes;
  // A forked child (a data loader's worker) has no part in this and must not keep the memory alive.
  madvise(base, nbytes, MADV_DONTFORK);
}

ShmRegion::~ShmRegion() {
  if (base_) munmap(base_, nbytes_);
  close_fd();
  return_budget(budget_);
}

void ShmRegion::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

ShmHeader::Mailbox& ShmRegion::mailbox(uint32_t member) {
  return reinterpret_cast<ShmHeader::Mailbox*>(&header() + 1)[member];
}

std::byte* ShmRegion::slot(uint32_t index) {
  return static_cast<std::byte*>(base_) + control_bytes(members_) + size_t{index} * slot_bytes_;
}

}  // namespace meshcast
