#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "ipc/fake_ipc.h"

// What ranks that are processes share in place of a GPU: memory, of which each has a part to allocate from, and
// events.
namespace meshcast::testing {

inline constexpr int32_t kMostProcesses = 8;
inline constexpr size_t kSharedEvents = 64;                // of a rank
inline constexpr int64_t kSharedBytes = int64_t{4} << 20;  // of a rank

struct SharedGpu {
  struct Event {
    std::atomic<uint64_t> recorded{0};  // as enqueued
    std::atomic<uint64_t> reached{0};   // the last record that is over
  };
  struct Rank {
    std::atomic<bool> listens{false};
    char address[128] = {};
    std::array<Event, kSharedEvents> events;
    std::atomic<int64_t> plans{0};  // that went well
    std::atomic<int32_t> lost{-1};  // the peer that its error named
    std::atomic<int32_t> child{0};  // a process that it forked, which has all of its sockets open
    char error[512] = {};
  };
  std::array<Rank, kMostProcesses> ranks;

  Rank& rank(int32_t r) { return ranks[static_cast<size_t>(r)]; }
};

// Anonymous memory that forked processes share; the file has no name.
class SharedMemory {
 public:
  SharedMemory() : fd_(memfd_create("meshcast-test", MFD_CLOEXEC)) {
    if (fd_ < 0 || ftruncate(fd_, kMostProcesses * kSharedBytes) != 0) throw std::runtime_error("no memfd");
    void* table = mmap(nullptr, sizeof(SharedGpu), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (table == MAP_FAILED) throw std::runtime_error("no shared memory");
    gpu_ = new (table) SharedGpu;
  }
  ~SharedMemory() {
    munmap(gpu_, sizeof(SharedGpu));
    close(fd_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  SharedGpu& gpu() { return *gpu_; }

  // A rank's part, mapped again: at another address each time, as CUDA does.
  std::byte* map(int32_t rank) {
    void* out = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, rank * kSharedBytes);
    if (out == MAP_FAILED) throw std::runtime_error("cannot map");
    return static_cast<std::byte*>(out);
  }

 private:
  int fd_;
  SharedGpu* gpu_ = nullptr;
};

// CUDA for one process. All that it can export is one allocation, its part of the shared memory.
class SharedIpcDriver final : public IpcDriver {
 public:
  SharedIpcDriver(FakeHost& host, int32_t rank, SharedMemory& memory)
      : host_(host), rank_(rank), memory_(memory), device_(host.cluster, rank), part_(memory.map(rank)) {}
  ~SharedIpcDriver() override { munmap(part_, kSharedBytes); }

  FakeDevice& device() { return device_; }

  std::optional<IpcRange> exportable(const std::byte* data) override {
    if (data < part_ || data >= part_ + kSharedBytes) return std::nullopt;
    return IpcRange{part_, kSharedBytes, 1};
  }
  std::optional<IpcHandle> export_memory(const IpcRange&) override { return handle(rank_, 0); }
  std::byte* open_memory(const IpcHandle& handle) override { return memory_.map(value(handle).first); }
  void close_memory(std::byte* base) noexcept override { munmap(base, kSharedBytes); }
  IpcMappings& mappings() override { return mappings_; }
  StagingPool& staging() override { return staging_; }
  std::shared_ptr<std::byte> allocate_exportable(int64_t nbytes) override {
    const std::lock_guard lock(host_.mutex);
    const int64_t rounded = (nbytes + 255) / 256 * 256;
    std::byte* out = nullptr;
    const auto spare = spare_.lower_bound(rounded);
    if (spare != spare_.end()) {
      out = spare->second;
      spare_.erase(spare);
    } else {
      if (used_ + rounded > kSharedBytes) throw Error(ErrorKind::Generic, "the test's GPU is full");
      out = part_ + used_;
      used_ += rounded;
    }
    return {out, [this, rounded](std::byte* data) {
              const std::lock_guard give(host_.mutex);
              spare_.emplace(rounded, data);
            }};
  }

  // Events that other processes see have numbers from 1 << 32 on; those of FakeDevice are below.
  Event make_ipc_event(IpcHandle* out) override {
    const std::lock_guard lock(host_.mutex);
    if (made_ == kSharedEvents) throw Error(ErrorKind::Generic, "the test's GPU is out of events");
    *out = handle(rank_, static_cast<int32_t>(made_));
    return number(rank_, made_++);
  }
  Event open_event(const IpcHandle& handle) override {
    const auto [rank, at] = value(handle);
    return number(rank, static_cast<size_t>(at));
  }

  // For the RoundDevice.
  void free_event(Event event) noexcept {
    if (event >> 32 == 0) device_.free_event(event);
  }
  void record(Event event, Stream stream) {
    if (event >> 32 == 0) return device_.record(event, stream);
    SharedGpu::Event& shared = of(event);
    const uint64_t count = ++shared.recorded;
    host_.cluster.enqueue(rank_, stream, [&shared, count] { shared.reached = count; });
  }
  void wait(Stream stream, Event event) {
    if (event >> 32 == 0) return device_.wait(stream, event);
    SharedGpu::Event& shared = of(event);
    FakeCluster::Item item;
    item.kind = FakeCluster::Item::Kind::Wait;
    item.until = [&shared, count = shared.recorded.load()] { return shared.reached >= count; };
    host_.cluster.rank(rank_).streams[stream].push_back(std::move(item));
  }
  bool reached(Event event) {
    if (event >> 32 == 0) return device_.reached(event);
    return of(event).reached >= of(event).recorded;
  }

  void copy(Stream stream, std::byte* to, const std::byte* from, int64_t nbytes) override {
    const std::lock_guard lock(host_.mutex);
    host_.cluster.enqueue(rank_, stream, [=] { std::memcpy(to, from, static_cast<size_t>(nbytes)); });
  }

 private:
  static IpcHandle handle(int32_t rank, int32_t at) {
    IpcHandle out{};
    std::memcpy(out.data(), &rank, 4);
    std::memcpy(out.data() + 4, &at, 4);
    return out;
  }
  static std::pair<int32_t, int32_t> value(const IpcHandle& handle) {
    std::pair<int32_t, int32_t> out;
    std::memcpy(&out.first, handle.data(), 4);
    std::memcpy(&out.second, handle.data() + 4, 4);
    return out;
  }
  static Event number(int32_t rank, size_t at) { return static_cast<Event>(rank + 1) << 32 | at; }
  SharedGpu::Event& of(Event event) {
    return memory_.gpu().rank(static_cast<int32_t>(event >> 32) - 1).events[event & 0xFFFFFFFF];
  }

  FakeHost& host_;
  const int32_t rank_;
  SharedMemory& memory_;
  FakeDevice device_;
  std::byte* const part_;
  int64_t used_ = 0;
  std::multimap<int64_t, std::byte*> spare_;
  size_t made_ = 0;
  IpcMappings mappings_;
  StagingPool staging_{{}};  // has nothing: the memory is that of the part
};

}  // namespace meshcast::testing
