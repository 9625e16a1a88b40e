#include "transport/shm_region.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

namespace meshcast {
namespace {

constexpr uint64_t kMagic = 0x6d63617374736d33;  // changes with the layout of ShmHeader
constexpr size_t kPage = 4096;
constexpr int64_t kLargest = int64_t{1} << 20;     // slots of one region: what a core has of its own holds them
constexpr int64_t kSmallest = int64_t{512} << 10;  // below this, copying in pieces costs more than it saves

std::mutex budget_mutex;
int64_t budget_left = int64_t{64} << 20;
int64_t budget_total = budget_left;

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
  region->memory_ = ShmMapping("meshcast", control_bytes(members) + static_cast<size_t>(region->budget_));
  auto* header = new (region->memory_.base()) ShmHeader;
  region->slots_ = header->slots = kMaxSlots;
  region->slot_bytes_ = header->slot_bytes = static_cast<uint32_t>(region->budget_ / kMaxSlots);
  region->members_ = header->members = members;
  auto* mailboxes = reinterpret_cast<ShmHeader::Mailbox*>(header + 1);
  for (uint32_t i = 0; i < members; ++i) new (mailboxes + i) ShmHeader::Mailbox;
  header->magic = kMagic;
  return region;
}

std::unique_ptr<ShmRegion> ShmRegion::open(int fd, uint32_t members) {
  std::unique_ptr<ShmRegion> region(new ShmRegion);
  region->memory_ = ShmMapping(fd, sizeof(ShmHeader));
  const ShmHeader& header = region->header();
  region->slots_ = header.slots;
  region->slot_bytes_ = header.slot_bytes;
  region->members_ = header.members;
  const bool fits = header.magic == kMagic && region->members_ >= members &&
                    region->members_ < kMaxLocalRanks && region->slots_ <= kMaxSlots &&
                    control_bytes(region->members_) + size_t{region->slots_} * region->slot_bytes_ <=
                        region->memory_.nbytes();
  if (!fits)
    throw std::runtime_error("a peer's shared memory has another form; is its meshcast another version?");
  return region;
}

ShmRegion::~ShmRegion() { return_budget(budget_); }

ShmHeader::Mailbox& ShmRegion::mailbox(uint32_t member) {
  return reinterpret_cast<ShmHeader::Mailbox*>(&header() + 1)[member];
}

std::byte* ShmRegion::slot(uint32_t index) {
  return static_cast<std::byte*>(memory_.base()) + control_bytes(members_) + size_t{index} * slot_bytes_;
}

}  // namespace meshcast
