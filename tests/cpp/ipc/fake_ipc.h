#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "ipc/ipc_exchange.h"
#include "ipc/staging_pool.h"
#include "rounds/device.h"
#include "rounds/fake_device.h"
#include "rounds/world.h"

// Ranks as threads, each with a faked GPU whose streams are done in any order that is allowed, and the real
// protocol of CUDA IPC between them, over real sockets.
namespace meshcast::testing {

// The memory of all GPUs, and which rank has what of it mapped. Guarded by `mutex`, as is the cluster.
struct FakeHost {
  explicit FakeHost(int world) : cluster(world) {}

  struct Allocation {
    int64_t nbytes = 0;
    uint64_t id = 0;
    bool exportable = true;
    bool refused = false;  // it says that it can be exported, and then cannot
  };
  struct Exported {
    std::byte* base = nullptr;
    int64_t nbytes = 0;
    int32_t owner = -1;
  };

  std::recursive_mutex mutex;
  FakeCluster cluster;
  std::map<std::byte*, Allocation> allocations;  // of all ranks: one process has one address space
  std::map<std::pair<int32_t, std::byte*>, int> mapped;
  std::map<uint64_t, Exported> exported;           // by id
  std::map<std::pair<int32_t, uint64_t>, int> as;  // which of those a rank has mapped
  std::set<RoundDevice::Event> dropped;            // events that their rank has freed, by the numbers of others
  uint64_t ids = 0;
  std::map<int32_t, IpcMappings> mappings;  // of each rank, whatever its lanes
  std::map<int32_t, std::unique_ptr<StagingPool>> staging;
  std::map<std::byte*, std::unique_ptr<std::byte[]>> pool_memory;  // what the pools have of the GPU
  int64_t opened = 0;
  int64_t already = 0;       // times that memory could not be mapped, since what lay there before was
  int64_t bounced = 0;       // copies out of what cannot be exported
  bool apart = false;        // ranks are in namespaces of their own: CUDA opens no events of others, and
  bool memory_apart = true;  // no memory either
  // A mutation of the protocol, which tests must see: waits for such an event of a peer are not enqueued.
  enum class Lost : uint8_t { None, Ready, Copied } lost = Lost::None;

  void allocate(std::byte* base, int64_t nbytes, bool exportable) {
    const std::lock_guard lock(mutex);
    allocations[base] = {nbytes, ++ids, exportable};
  }
  void free(std::byte* base) {
    const std::lock_guard lock(mutex);
    allocations.erase(base);
  }
  StagingPool::Memory pooled() {
    return {[this](int64_t nbytes) {
              auto memory = std::make_unique<std::byte[]>(static_cast<size_t>(nbytes));
              std::byte* const out = memory.get();
              allocate(out, nbytes, true);
              const std::lock_guard lock(mutex);
              pool_memory[out] = std::move(memory);
              return out;
            },
            [this](std::byte* base) {
              const std::lock_guard lock(mutex);
              for (const auto& [where, count] : mapped)
                if (where.second == base && count > 0) cluster.mistakes.emplace_back("mapped memory was freed");
              allocations.erase(base);
              pool_memory.erase(base);
            }};
  }
};

// What CUDA would do for one rank. An event of another rank has that rank in its upper half.
class FakeIpcDriver final : public IpcDriver {
 public:
  FakeIpcDriver(FakeHost& host, int32_t rank) : host_(host), rank_(rank), device_(host.cluster, rank) {}

  FakeDevice& device() { return device_; }

  std::optional<IpcRange> exportable(const std::byte* data) override {
    const std::lock_guard lock(host_.mutex);
    auto next = host_.allocations.upper_bound(const_cast<std::byte*>(data));  // only compared
    if (next == host_.allocations.begin()) return std::nullopt;
    const auto& [base, found] = *--next;
    if (data >= base + found.nbytes || !found.exportable) return std::nullopt;
    return IpcRange{base, found.nbytes, found.id};
  }
  std::optional<IpcHandle> export_memory(const IpcRange& range) override {
    const std::lock_guard lock(host_.mutex);
    if (host_.allocations.at(range.base).refused) return std::nullopt;
    host_.exported[range.id] = {range.base, range.nbytes, rank_};
    return handle_of(range.id);
  }
  std::byte* open_memory(const IpcHandle& handle) override {
    const std::lock_guard lock(host_.mutex);
    if (host_.apart && host_.memory_apart) refuse();
    const uint64_t id = value_of_handle(handle);
    const auto [base, nbytes, owner] = host_.exported.at(id);
    for (const auto& [which, count] : host_.as) {
      const FakeHost::Exported& other = host_.exported.at(which.second);
      const bool apart = other.base + other.nbytes <= base || base + nbytes <= other.base;
      if (which.first == rank_ && count > 0 && which.second != id && other.owner == owner && !apart) {
        ++host_.already;
        return nullptr;
      }
    }
    ++host_.opened;
    ++host_.mapped[{rank_, base}];
    ++host_.as[{rank_, id}];
    return base;
  }
  void close_memory(std::byte* base) noexcept override {
    const std::lock_guard lock(host_.mutex);
    if (--host_.mapped[{rank_, base}] < 0) host_.cluster.mistakes.emplace_back("memory closed twice");
    // Where another rank's memory came to lie at the same address, the older is meant.
    const auto oldest = std::find_if(host_.as.begin(), host_.as.end(), [&](const auto& each) {
      return each.first.first == rank_ && each.second > 0 && host_.exported.at(each.first.second).base == base;
    });
    if (oldest != host_.as.end()) --oldest->second;
  }
  IpcMappings& mappings() override {
    const std::lock_guard lock(host_.mutex);
    return host_.mappings[rank_];
  }
  StagingPool& staging() override {
    const std::lock_guard lock(host_.mutex);
    auto& pool = host_.staging[rank_];
    if (!pool) pool = std::make_unique<StagingPool>(host_.pooled());
    return *pool;
  }
  // What is let go of, the next who asks may have: it is spoilt at once.
  std::shared_ptr<std::byte> allocate_exportable(int64_t nbytes) override {
    auto memory = std::shared_ptr<std::byte>(new std::byte[static_cast<size_t>(nbytes)],
                                             std::default_delete<std::byte[]>());
    std::memset(memory.get(), 0x5A, static_cast<size_t>(nbytes));
    host_.allocate(memory.get(), nbytes, true);
    const std::lock_guard lock(host_.mutex);
    owned_.push_back(memory);
    return {memory.get(), [&host = host_, memory, nbytes](std::byte* data) {
              const std::lock_guard spoil(host.mutex);
              std::memset(data, 0xEE, static_cast<size_t>(nbytes));
            }};
  }

  Event make_ipc_event(IpcHandle* handle) override {
    const std::lock_guard lock(host_.mutex);
    const Event event = device_.make_event();
    *handle = handle_of(static_cast<uint64_t>(rank_ + 1) << 32 | event);
    return event;
  }
  Event open_event(const IpcHandle& handle) override {
    if (host_.apart) refuse();
    const Event event = value_of_handle(handle);
    if (++opened_events_ % 2 == 0) copied_.insert(event);  // of each peer: `ready` first, then `copied`
    return event;
  }

  // For the RoundDevice: also events of other ranks.
  void free_event(Event event) noexcept {
    if (event >> 32 != 0) return;
    host_.dropped.insert(static_cast<uint64_t>(rank_ + 1) << 32 | event);
    device_.free_event(event);
  }
  void record(Event event, Stream stream) {
    if (event >> 32 != 0) host_.cluster.mistakes.emplace_back("another rank's event was recorded");
    device_.record(event, stream);
  }
  void wait(Stream stream, Event event) {
    if (event >> 32 == 0) return device_.wait(stream, event);
    const auto kind = copied_.contains(event) ? FakeHost::Lost::Copied : FakeHost::Lost::Ready;
    if (host_.lost == kind) return;
    if (host_.dropped.contains(event)) host_.cluster.mistakes.emplace_back("a wait for an event that is gone");
    const auto owner = static_cast<int32_t>(event >> 32) - 1;
    const size_t at = event & 0xFFFFFFFF;
    FakeCluster& cluster = host_.cluster;
    const size_t count = cluster.rank(owner).recorded[at];
    FakeCluster::Item item;
    item.kind = FakeCluster::Item::Kind::Wait;
    item.until = [&cluster, owner, at, count] { return cluster.rank(owner).reached[at][count] != 0; };
    cluster.rank(rank_).streams[stream].push_back(std::move(item));
  }
  bool reached(Event event) {
    if (event >> 32 == 0) return device_.reached(event);
    const auto owner = static_cast<int32_t>(event >> 32) - 1;
    return host_.cluster.rank(owner).reached[event & 0xFFFFFFFF].back() != 0;
  }

  void copy(Stream stream, std::byte* to, const std::byte* from, int64_t nbytes) override {
    const std::lock_guard lock(host_.mutex);
    const auto base = [this](const std::byte* data) -> std::byte* {
      auto next = host_.allocations.upper_bound(const_cast<std::byte*>(data));  // only compared
      return next == host_.allocations.begin() ? nullptr : (--next)->first;
    };
    std::byte* const there = base(from);
    const bool own =
        std::any_of(owned_.begin(), owned_.end(), [&](const auto& o) { return o.get() == base(to); });
    const bool mapped = there != nullptr && host_.mapped[{rank_, there}] > 0;
    if (!mapped) ++host_.bounced;
    if (!mapped && !own) host_.cluster.mistakes.emplace_back("a copy out of memory that is not mapped");
    host_.cluster.enqueue(rank_, stream, [this, to, from, nbytes, there, mapped] {
      if (mapped && host_.mapped[{rank_, there}] == 0)
        host_.cluster.mistakes.emplace_back("memory was closed before it was copied");
      std::memcpy(to, from, static_cast<size_t>(nbytes));
    });
  }

 private:
  static IpcHandle handle_of(uint64_t value) {
    IpcHandle out{};
    std::memcpy(out.data(), &value, sizeof value);
    return out;
  }
  [[noreturn]] static void refuse() {
    throw Error(ErrorKind::Generic, "CUDA opens nothing of another namespace");
  }
  static uint64_t value_of_handle(const IpcHandle& handle) {
    uint64_t value = 0;
    std::memcpy(&value, handle.data(), sizeof value);
    return value;
  }

  FakeHost& host_;
  const int32_t rank_;
  FakeDevice device_;
  std::vector<std::shared_ptr<std::byte>> owned_;
  std::set<Event> copied_;
  int opened_events_ = 0;
};

// A RoundDevice whose streams are faked and whose groups are those of CUDA IPC.
template <class Driver>
class FakeIpcDeviceOf final : public RoundDevice {
 public:
  template <class... More>
  FakeIpcDeviceOf(FakeHost& host, int32_t rank, More&... more) : driver(host, rank, more...), host_(host) {}

  const char* transport() const override { return "cuda_ipc"; }
  bool meets_hosts() const override { return true; }
  Stream kernel_stream() override { return FakeCluster::kKernels; }
  Stream transfer_stream() override { return FakeCluster::kTransfer; }
  Event make_event() override {
    return locked([&] { return driver.device().make_event(); });
  }
  void free_event(Event event) noexcept override {
    locked([&] { driver.free_event(event); });
  }
  void record(Event event, Stream stream) override {
    locked([&] { driver.record(event, stream); });
  }
  void wait(Stream stream, Event event) override {
    locked([&] { driver.wait(stream, event); });
  }
  bool reached(Event event) override {
    return locked([&] { return driver.reached(event); });
  }
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override { return driver.allocate_exportable(nbytes); }
  void retire(const std::byte* staging) override { groups->retire(staging); }
  bool rest() override { return groups->rest(); }
  void move_boxes(Stream stream, std::span<const BoxMove> boxes) override {
    locked([&] { fake().move_boxes(stream, boxes); });
  }
  void reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) override {
    locked([&] { fake().reduce_boxes(stream, boxes); });
  }
  GroupOutcome group_start() override {
    groups->start();
    ++started;
    return {};
  }
  GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer, Stream) override {
    return groups->send(data, nbytes, peer);
  }
  GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer, Stream) override {
    return groups->recv(data, nbytes, peer);
  }
  GroupOutcome group_end() override { return groups->end(); }
  GroupOutcome async_error() override {
    ++looks;
    return groups->progress();
  }
  void abort() noexcept override { groups->abort(); }

  Driver driver;
  std::unique_ptr<IpcExchange> groups;
  int64_t started = 0;
  std::atomic<int64_t> looks = 0;  // for the hosts of its peers

 private:
  FakeDevice& fake() { return driver.device(); }
  template <class Call>
  std::invoke_result_t<const Call&> locked(const Call& call) {
    const std::lock_guard lock(host_.mutex);
    return call();
  }

  FakeHost& host_;
};

using FakeIpcDevice = FakeIpcDeviceOf<FakeIpcDriver>;

// Engines of all ranks of a host, connected.
class IpcWorld {
 public:
  explicit IpcWorld(int size) : host(size), group(static_cast<size_t>(size)) {
    std::iota(group.begin(), group.end(), 0);
    std::vector<IpcMeeting> meetings(group.size());
    std::vector<std::string> addresses;
    for (const IpcMeeting& meeting : meetings) addresses.push_back(meeting.address());
    std::vector<std::thread> threads;
    for (const int32_t rank : group) devices.push_back(std::make_shared<FakeIpcDevice>(host, rank));
    for (const int32_t rank : group) {
      threads.emplace_back([&, rank] {
        FakeIpcDevice& device = *devices[static_cast<size_t>(rank)];
        device.groups = IpcExchange::connect(device.driver, device, meetings[static_cast<size_t>(rank)],
                                             addresses, rank, Clock::now() + kLong, [] {});
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int32_t rank : group)
      engines.push_back(std::make_unique<RoundEngine>(devices[static_cast<size_t>(rank)], rank, group));
  }
  ~IpcWorld() {
    engines.clear();
    for (const auto& device : devices) device->groups.reset();
  }

  // As World::start, always behind an event; `gate`: of the run alone.
  void start(int32_t rank, RankCase& part, int number, std::chrono::milliseconds limit = kLong) {
    const auto source = part.source;
    const auto destination = part.destination;
    FakeIpcDevice& device = *devices[static_cast<size_t>(rank)];
    {
      const std::lock_guard lock(host.mutex);
      host.cluster.enqueue(rank, FakeCluster::kCaller, [source, destination] {
        source->memory = source->written;
        destination->memory = destination->written;
      });
    }
    const RoundDevice::Event after = device.make_event();
    device.record(after, FakeCluster::kCaller);
    part.run = engines[static_cast<size_t>(rank)]->start(part.rounds, part.memory(), gate(number),
                                                         label(number), Clock::now() + limit, after);
    device.free_event(after);
  }

  // The caller's stream joins the run, looks at the result and reuses the memory. Waits for the hosts.
  void join(int32_t rank, RankCase& part) {
    engines[static_cast<size_t>(rank)]->follow(*part.run, FakeCluster::kCaller);
    const auto source = part.source;
    const auto destination = part.destination;
    const std::lock_guard lock(host.mutex);
    host.cluster.enqueue(rank, FakeCluster::kCaller, [source, destination] {
      destination->seen = destination->memory;
      std::fill(source->memory.begin(), source->memory.end(), std::byte{0xDD});
      std::fill(destination->memory.begin(), destination->memory.end(), std::byte{0xDD});
    });
  }

  // The GPUs go on, and the engines look, until `done`. Returns whether that came in time.
  bool run_until(std::mt19937& rng, const std::function<bool()>& done,
                 std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    const TimePoint end = Clock::now() + limit;
    while (!done()) {
      if (Clock::now() >= end) return false;
      {
        const std::lock_guard lock(host.mutex);
        host.cluster.run(rng, 1 + static_cast<int64_t>(rng() % 40));
      }
      for (const auto& engine : engines)
        if (engine) engine->poll(Clock::now());
      std::this_thread::yield();
    }
    return true;
  }

  static RoundDevice::Stream gate(int number) {
    return number % 2 == 0 ? FakeCluster::kGate : FakeCluster::kOtherCaller;
  }

  FakeHost host;
  std::vector<int32_t> group;
  std::vector<std::shared_ptr<FakeIpcDevice>> devices;
  std::vector<std::unique_ptr<RoundEngine>> engines;
};

}  // namespace meshcast::testing
