#include "ipc/ipc_memory.h"

#include <algorithm>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {

std::optional<IpcExports::Place> IpcExports::find(const std::byte* data, uint64_t now) {
  const auto range = driver_.exportable(data);
  if (!range) return std::nullopt;
  const auto hit = by_base_.find(range->base);
  if (hit != by_base_.end()) {
    Entry& entry = entries_.at(hit->second);
    if (entry.range.id == range->id) {
      entry.used = now;
      return Place{hit->second, data - range->base};
    }
  }
  forget_overlapped(*range);
  if (refused_.contains(range->id)) return std::nullopt;
  const auto handle = driver_.export_memory(*range);
  if (!handle) {
    if (refused_.size() >= kMost) refused_.clear();
    refused_.insert(range->id);
    return std::nullopt;
  }
  if (entries_.size() >= kMost) {
    const auto oldest = std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    });
    if (oldest->second.used < now) forget(oldest->first);
  }
  const uint64_t memory = next_++;
  entries_.emplace(memory, Entry{*range, *handle, now});
  by_base_[range->base] = memory;
  return Place{memory, data - range->base};
}

// What has been freed, and is another allocation now or part of one. It need not have begun where that does.
void IpcExports::forget_overlapped(const IpcRange& range) {
  auto next = by_base_.lower_bound(range.base + range.nbytes);
  while (next != by_base_.begin()) {
    const IpcRange& before = entries_.at((--next)->second).range;
    if (before.base + before.nbytes <= range.base) return;
    const uint64_t memory = next->second;
    ++next;
    forget(memory);
  }
}

void IpcExports::forget(uint64_t memory) {
  const auto entry = entries_.find(memory);
  by_base_.erase(entry->second.range.base);
  entries_.erase(entry);
  forgotten_.push_back(memory);
}

void IpcImports::add(uint64_t memory, const IpcHandle& handle, int64_t nbytes) {
  entries_[memory] = {handle, nbytes, nullptr};
}

const std::byte* IpcImports::at(uint64_t memory, int64_t offset, int64_t nbytes) {
  const auto found = entries_.find(memory);
  // What a peer says is never trusted as an address.
  if (found == entries_.end() || offset < 0 || nbytes < 0 || nbytes > found->second.nbytes ||
      offset > found->second.nbytes - nbytes)
    throw Error(ErrorKind::Generic,
                fmt::format("a peer named {} bytes at {} of memory {}, which it has not shown", nbytes, offset,
                            memory));
  Entry& entry = found->second;
  if (entry.base == nullptr) {
    sweep();
    if (!closing_.empty()) return nullptr;
    entry.base = driver_.open_memory(entry.handle);
  }
  return entry.base + offset;
}

void IpcImports::forget(uint64_t memory) {
  const auto found = entries_.find(memory);
  if (found == entries_.end()) return;
  if (found->second.base != nullptr) {
    const RoundDevice::Event passed = device_.make_event();
    closing_.push_back({found->second.base, passed});
    device_.record(passed, device_.transfer_stream());
  }
  entries_.erase(found);
}

void IpcImports::sweep() {
  std::erase_if(closing_, [this](const Closing& each) {
    if (!device_.reached(each.passed)) return false;
    driver_.close_memory(each.base);
    device_.free_event(each.passed);
    return true;
  });
}

void IpcImports::close_all() {
  for (const Closing& each : closing_) {
    driver_.close_memory(each.base);
    device_.free_event(each.passed);
  }
  closing_.clear();
  for (const auto& [memory, entry] : entries_)
    if (entry.base != nullptr) driver_.close_memory(entry.base);
  entries_.clear();
}

}  // namespace meshcast
