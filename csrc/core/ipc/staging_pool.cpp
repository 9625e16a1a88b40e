#include "ipc/staging_pool.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include <fmt/format.h>

namespace meshcast {
namespace {

// Smallest block: what cudaMalloc gives out in any case.
constexpr int64_t kLeastBytes = int64_t{2} << 20;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Up to an eighth more, so that blocks serve requests of similar sizes.
int64_t rounded_up(int64_t nbytes) {
  const int64_t step =
      std::max<int64_t>(kLeastBytes, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(nbytes))) / 8);
  return (std::max<int64_t>(nbytes, 1) + step - 1) / step * step;
}

constexpr double mib(int64_t nbytes) { return static_cast<double>(nbytes) / (1 << 20); }

}  // namespace

void StagingPool::limit_to(int64_t nbytes) {
  const std::lock_guard lock(mutex_);
  figures_.limit = nbytes;
}

// Phase 1: a spare block that is not much larger. Phase 2: a new one, in whose place spare ones go where there
// is no room for both. Phase 3: any spare block that is large enough.
std::byte* StagingPool::take(int64_t nbytes) {
  const std::lock_guard one_at_a_time(calls_);
  const int64_t rounded = rounded_up(nbytes);
  std::vector<std::byte*> freed;
  bool fits = true;
  Blocks::iterator found;
  {
    const std::lock_guard lock(mutex_);
    hear_parted();
    found = spare_of(rounded, 2 * rounded);
    if (found == blocks_.end() && figures_.limit > 0) {
      const int64_t beyond = figures_.in_use + figures_.spare + rounded - figures_.limit;
      if (beyond > 0) freed = take_out(beyond);
      fits = figures_.in_use + figures_.spare + rounded <= figures_.limit;
      if (!fits) found = spare_of(rounded, kMost);
    }
    if (found != blocks_.end()) {
      found->second.spare = false;
      figures_.spare -= found->second.nbytes;
      figures_.in_use += found->second.nbytes;
      figures_.peak = std::max(figures_.peak, figures_.in_use);
    }
  }
  free_all(freed);
  if (found != blocks_.end()) return const_cast<std::byte*>(found->first);
  if (!fits) throw beyond_limit(rounded);
  std::byte* const out = memory_.allocate(rounded);
  const std::lock_guard lock(mutex_);
  blocks_[out] = {rounded, false, 0};
  ++figures_.allocations;
  figures_.in_use += rounded;
  figures_.peak = std::max(figures_.peak, figures_.in_use);
  return out;
}

Error StagingPool::beyond_limit(int64_t nbytes) const {
  const Figures now = figures();
  return {ErrorKind::Generic,
          fmt::format("{:.1f} MiB of staging are needed with {:.1f} MiB that are in use or mapped by other "
                      "ranks, and {:.1f} MiB are allowed: raise MESHCAST_CUDA_STAGING_MB, or have fewer groups "
                      "and calls in flight",
                      mib(nbytes), mib(now.in_use + now.spare), mib(now.limit))};
}

void StagingPool::give(std::byte* data) {
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.at(data);
  block.spare = true;
  figures_.in_use -= block.nbytes;
  figures_.spare += block.nbytes;
}

bool StagingPool::show(const std::byte* base) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(base);
  if (found == blocks_.end()) return false;
  ++found->second.shown;
  return true;
}

void StagingPool::hide(const std::byte* base) {
  const std::lock_guard lock(mutex_);
  hide_locked(base);
}

void StagingPool::hide_locked(const std::byte* base) {
  const auto found = blocks_.find(base);
  if (found != blocks_.end()) --found->second.shown;
}

void StagingPool::part(IpcLink link, std::vector<const std::byte*> bases) {
  const std::lock_guard lock(mutex_);
  std::erase_if(bases, [this](const std::byte* base) { return !blocks_.contains(base); });
  if (!bases.empty()) parted_.push_back({std::move(link), std::move(bases)});
}

void StagingPool::hear_parted() {
  for (auto each = parted_.begin(); each != parted_.end();) {
    IpcNote note;
    note.kind = IpcNote::Kind::Closed;
    IpcLink::Got got = IpcLink::Got::Note;
    while (got == IpcLink::Got::Note && note.kind != IpcNote::Kind::Bye) got = each->link.receive(&note);
    if (got == IpcLink::Got::Nothing) {
      ++each;
      continue;
    }
    for (const std::byte* base : each->bases) hide_locked(base);
    each = parted_.erase(each);
  }
}

StagingPool::Blocks::iterator StagingPool::spare_of(int64_t least, int64_t most) {
  auto best = blocks_.end();
  for (auto each = blocks_.begin(); each != blocks_.end(); ++each) {
    const Block& block = each->second;
    if (!block.spare || block.nbytes < least || block.nbytes > most) continue;
    if (best == blocks_.end() || block.nbytes < best->second.nbytes) best = each;
  }
  return best;
}

// Spare blocks that no peer has mapped, largest first, of so many bytes; the caller frees them.
std::vector<std::byte*> StagingPool::take_out(int64_t nbytes) {
  std::vector<std::byte*> out;
  while (nbytes > 0) {
    auto largest = blocks_.end();
    for (auto each = blocks_.begin(); each != blocks_.end(); ++each) {
      const Block& block = each->second;
      if (!block.spare || block.shown > 0) continue;
      if (largest == blocks_.end() || block.nbytes > largest->second.nbytes) largest = each;
    }
    if (largest == blocks_.end()) break;
    nbytes -= largest->second.nbytes;
    figures_.spare -= largest->second.nbytes;
    ++figures_.returned;
    out.push_back(const_cast<std::byte*>(largest->first));
    blocks_.erase(largest);
  }
  return out;
}

void StagingPool::free_all(const std::vector<std::byte*>& blocks) {
  for (std::byte* const each : blocks) memory_.free(each);
}

void StagingPool::trim() {
  std::vector<std::byte*> freed;
  {
    const std::lock_guard lock(mutex_);
    hear_parted();
    if (figures_.in_use == 0) freed = take_out(kMost);
  }
  free_all(freed);
}

StagingPool::Figures StagingPool::figures() const {
  const std::lock_guard lock(mutex_);
  return figures_;
}

}  // namespace meshcast
