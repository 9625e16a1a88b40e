#include "transport/shm_region.h"

#include <new>
#include <stdexcept>

namespace meshcast {
namespace {

constexpr uint64_t kMagic = 0x6d63617374736d33;  // changes with the layout of ShmHeader
constexpr size_t kPage = 4096;
constexpr size_t page_up(size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

constexpr size_t control_bytes(uint32_t members) {
  return page_up(sizeof(ShmHeader) + members * sizeof(ShmHeader::Mailbox));
}

}  // namespace

std::unique_ptr<ShmRegion> ShmRegion::create(uint32_t members) {
  std::unique_ptr<ShmRegion> region(new ShmRegion);
  region->share_ = ShmShare::of_group(kMaxSlots * static_cast<int64_t>(kPage));
  const int64_t nbytes = region->share_.nbytes();
  region->memory_ = ShmMapping("meshcast", control_bytes(members) + static_cast<size_t>(nbytes));
  auto* header = new (region->memory_.base()) ShmHeader;
  region->slots_ = header->slots = kMaxSlots;
  region->slot_bytes_ = header->slot_bytes = static_cast<uint32_t>(nbytes / kMaxSlots);
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

ShmHeader::Mailbox& ShmRegion::mailbox(uint32_t member) {
  return reinterpret_cast<ShmHeader::Mailbox*>(&header() + 1)[member];
}

std::byte* ShmRegion::slot(uint32_t index) {
  return static_cast<std::byte*>(memory_.base()) + control_bytes(members_) + size_t{index} * slot_bytes_;
}

}  // namespace meshcast
