#include "transport/shm_pipe.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "common/fault_point.h"

namespace meshcast {
namespace {

constexpr uint64_t kPipeMagic = 0x6d63707069706531;  // changes with the layout of Header and Record
constexpr int64_t kPipePage = 4096;
constexpr int64_t kLargestPipe = int64_t{1} << 30;

}  // namespace

std::unique_ptr<ShmPipe> ShmPipe::create() {
  std::unique_ptr<ShmPipe> pipe(new ShmPipe);
  pipe->share_ = ShmShare::of_pair(kPipePage);
  pipe->capacity_ = pipe->share_.nbytes();
  pipe->memory_ = ShmMapping("meshcast-pipe", sizeof(Header) + static_cast<size_t>(pipe->capacity_));
  auto* header = new (pipe->memory_.base()) Header;
  header->capacity = pipe->capacity_u();
  header->magic = kPipeMagic;
  return pipe;
}

std::unique_ptr<ShmPipe> ShmPipe::open(int fd) {
  std::unique_ptr<ShmPipe> pipe(new ShmPipe);
  pipe->memory_ = ShmMapping(fd, sizeof(Header));
  const Header& header = pipe->header();
  const uint64_t capacity = header.capacity;
  if (header.magic != kPipeMagic || capacity < kPipePage || capacity > kLargestPipe || capacity % kAlign != 0 ||
      sizeof(Header) + capacity > pipe->memory_.nbytes())
    throw std::runtime_error("a peer's shared memory has another form; is its meshcast another version?");
  pipe->capacity_ = static_cast<int64_t>(capacity);
  return pipe;
}

template <typename Call>
void ShmPipe::parts(int64_t count, const Call& call) {
  const uint64_t begin = position_ + kHead;
  const auto until_end = static_cast<int64_t>(capacity_u() - begin % capacity_u());
  const int64_t first = std::min(count, until_end);
  if (first > 0) call(at(begin), int64_t{0}, first);
  if (first < count) call(at(0), first, count - first);
}

bool ShmPipe::has_room(int64_t count) {
  const uint64_t used = position_ - header().head.load();
  broken_ |= used > capacity_u() || used % kAlign != 0;
  return !broken_ && used + static_cast<uint64_t>(size_of(count)) <= capacity_u();
}

void ShmPipe::write(const Record& record, Outgoing& message) {
  std::memcpy(at(position_), &record, sizeof record);
  parts(record.count,
        [&](std::byte* to, int64_t from, int64_t nbytes) { message.read(record.offset + from, nbytes, to); });
  position_ += static_cast<uint64_t>(size_of(record.count));
  MC_FAULT_POINT("fragment");
  header().tail.store(position_);  // sequentially consistent: see awaited
}

std::optional<ShmPipe::Record> ShmPipe::read() {
  const uint64_t there = header().tail.load() - position_;
  if (there == 0 || broken_) return std::nullopt;
  Record record;
  broken_ = there > capacity_u() || there % kAlign != 0;
  if (!broken_) std::memcpy(&record, at(position_), sizeof record);
  const int64_t count = record.count;
  broken_ = broken_ || size_of(count) > static_cast<int64_t>(there) || record.kind > Kind::Piece ||
            record.offset < 0 || record.nbytes < count || record.offset > record.nbytes - count;
  return broken_ ? std::nullopt : std::optional(record);
}

void ShmPipe::copy(const Record& record, Incoming& message) {
  parts(record.count, [&](const std::byte* from, int64_t to, int64_t nbytes) {
    message.write(record.offset + to, nbytes, from);
  });
}

void ShmPipe::remove(const Record& record) {
  position_ += static_cast<uint64_t>(size_of(record.count));
  header().head.store(position_);  // sequentially consistent: see starved
}

bool ShmPipe::mostly_free() { return header().tail.load() - position_ <= capacity_u() / 2; }

}  // namespace meshcast
