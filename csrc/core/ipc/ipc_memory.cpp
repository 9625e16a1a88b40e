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

// Forgets freed allocations in whose place there is another now. They need not begin where that does.
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

void IpcExports::forget_at(const std::byte* base) {
  const auto found = by_base_.find(base);
  if (found != by_base_.end()) forget(found->second);
}

void IpcMappings::add(IpcImports* imports) {
  const std::lock_guard lock(mutex_);
  all_.insert(imports);
}

void IpcMappings::remove(IpcImports* imports) {
  const std::lock_guard lock(mutex_);
  all_.erase(imports);
}

bool IpcMappings::close_others(const IpcImports* imports) {
  const std::lock_guard lock(mutex_);
  bool stays = false;
  for (IpcImports* each : all_)
    if (each != imports && !each->close_idle()) stays = true;
  return stays;
}

void IpcImports::add(uint64_t memory, const IpcHandle& handle, int64_t nbytes) {
  const std::lock_guard lock(mutex_);
  entries_[memory] = {handle, nbytes, nullptr};
}

const std::byte* IpcImports::at(uint64_t memory, int64_t offset, int64_t nbytes) {
  const auto found = entries_.find(memory);
  // Values from a peer are never trusted as addresses.
  if (found == entries_.end() || offset < 0 || nbytes < 0 || nbytes > found->second.nbytes ||
      offset > found->second.nbytes - nbytes)
    throw Error(ErrorKind::Generic,
                fmt::format("a peer named {} bytes at {} of memory {}, which it has not shown", nbytes, offset,
                            memory));
  Entry& entry = found->second;
  Opened opened = open(&entry);
  if (opened == Opened::Refused) {
    // Without the lock, since others do the same to this one.
    const bool stays = driver_.mappings().close_others(this);
    opened = open(&entry);
    if (opened == Opened::Refused && !stays)
      throw Error(ErrorKind::Generic,
                  "CUDA refuses to map another process's memory (already mapped), although nothing of meshcast "
                  "has what lay there before: another library of this process may");
  }
  return opened == Opened::Yes ? entry.base + offset : nullptr;
}

// It is in use from here on, if it is mapped now.
IpcImports::Opened IpcImports::open(Entry* entry) {
  const std::lock_guard lock(mutex_);
  if (entry->base == nullptr) {
    sweep_locked();
    if (!closing_.empty()) return Opened::Later;
    entry->base = driver_.open_memory(entry->handle);
    if (entry->base == nullptr) return Opened::Refused;
  }
  in_use_ = true;
  return Opened::Yes;
}

void IpcImports::used_until(RoundDevice::Event event) {
  const std::lock_guard lock(mutex_);
  in_use_ = false;
  until_ = event;
}

void IpcImports::forget(uint64_t memory) {
  const auto found = entries_.find(memory);
  if (found == entries_.end()) return;
  const std::lock_guard lock(mutex_);
  if (found->second.base != nullptr) {
    const RoundDevice::Event passed = device_.make_event();
    closing_.push_back({found->second.base, passed, memory});
    device_.record(passed, device_.transfer_stream());
  } else {
    closed_.push_back(memory);
  }
  entries_.erase(found);
}

void IpcImports::sweep() {
  const std::lock_guard lock(mutex_);
  sweep_locked();
}

void IpcImports::sweep_locked() {
  std::erase_if(closing_, [this](const Closing& each) {
    if (!device_.reached(each.passed)) return false;
    driver_.close_memory(each.base);
    device_.free_event(each.passed);
    closed_.push_back(each.memory);
    return true;
  });
}

bool IpcImports::close_idle() {
  const std::lock_guard lock(mutex_);
  sweep_locked();
  if (in_use_ || (until_ != 0 && !device_.reached(until_))) return false;
  for (auto& [memory, entry] : entries_)
    if (entry.base != nullptr) driver_.close_memory(std::exchange(entry.base, nullptr));
  return closing_.empty();
}

void IpcImports::close_all() {
  const std::lock_guard lock(mutex_);
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
