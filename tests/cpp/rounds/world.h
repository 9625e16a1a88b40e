#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "catch.h"
#include "plan/cases.h"
#include "rounds/cases.h"
#include "rounds/fake_device.h"
#include "rounds/round_engine.h"

// Engines of rounds on GPUs that are faked, and what they move.
namespace meshcast::testing {

inline constexpr auto kLong = std::chrono::seconds(600);

// A tensor on the GPU: what the caller's stream writes there before a run, and what it sees after it.
struct GpuTensor {
  std::vector<std::byte> memory, written, seen;

  explicit GpuTensor(std::vector<std::byte> values)
      : memory(values.size(), std::byte{0xEE}), written(std::move(values)) {}
  explicit GpuTensor(const std::vector<int64_t>& values) : GpuTensor(bytes_of(values)) {}

  static std::vector<std::byte> bytes_of(const std::vector<int64_t>& values) {
    std::vector<std::byte> out(values.size() * 8);
    std::memcpy(out.data(), values.data(), out.size());
    return out;
  }
};

struct RankCase {
  std::shared_ptr<GpuTensor> source, destination;
  // Where the tensors of the problems begin in them.
  std::vector<size_t> source_at{0}, destination_at{0};
  std::vector<std::byte> expected;
  std::shared_ptr<const RankRounds> rounds;
  std::shared_ptr<RoundRun> run;

  RoundMemory memory() const {
    RoundMemory out;
    for (const size_t at : source_at) out.source.push_back(source->memory.data() + at);
    for (const size_t at : destination_at) out.destination.push_back(destination->memory.data() + at);
    out.keepalive = source;
    return out;
  }
};

// One engine per rank of a fake cluster.
class World {
 public:
  explicit World(int size) : cluster(size), group(static_cast<size_t>(size)) {
    std::iota(group.begin(), group.end(), 0);
    for (const int32_t rank : group) {
      devices.push_back(std::make_shared<FakeDevice>(cluster, rank));
      engines.push_back(std::make_unique<RoundEngine>(devices.back(), rank, group));
    }
  }

  // One engine per rank, with somebody who decides what a failure is called.
  World(int size, const std::function<RoundObserver(int32_t)>& observer) : World(size) {
    for (const int32_t rank : group)
      engines[static_cast<size_t>(rank)] =
          std::make_unique<RoundEngine>(devices[static_cast<size_t>(rank)], rank, group, observer(rank));
  }

  RoundEngine& engine(int32_t rank) { return *engines[static_cast<size_t>(rank)]; }

  // Behind the caller's stream writing the tensors; what it does next is to look at them, then to reuse them.
  // gated: the run is behind an event, on a stream of its own, and the caller's stream joins it later.
  void start(int32_t rank, RankCase& part, int number, std::chrono::milliseconds limit = kLong,
             bool gated = false, const std::function<void()>& meanwhile = {}) {
    // Threads of the user may have streams of their own.
    const auto caller = number % 2 == 0 ? FakeCluster::kCaller : FakeCluster::kOtherCaller;
    const auto source = part.source;
    const auto destination = part.destination;
    cluster.enqueue(rank, caller, [source, destination] {
      source->memory = source->written;
      destination->memory = destination->written;
    });
    FakeDevice& device = *devices[static_cast<size_t>(rank)];
    const RoundDevice::Event after = gated ? device.make_event() : 0;
    if (gated) device.record(after, caller);
    part.run = engine(rank).start(part.rounds, part.memory(), gated ? FakeCluster::kGate : caller,
                                  label(number), Clock::now() + limit, after);
    if (gated) device.free_event(after);
    if (meanwhile) cluster.enqueue(rank, caller, meanwhile);
    if (gated) engine(rank).follow(*part.run, caller);
    cluster.enqueue(rank, caller, [source, destination] {
      destination->seen = destination->memory;
      std::fill(source->memory.begin(), source->memory.end(), std::byte{0xDD});
      std::fill(destination->memory.begin(), destination->memory.end(), std::byte{0xDD});
    });
  }

  void poll() {
    for (const auto& engine : engines) engine->poll(Clock::now());
  }

  FakeCluster cluster;
  std::vector<int32_t> group;
  std::vector<std::shared_ptr<FakeDevice>> devices;
  std::vector<std::unique_ptr<RoundEngine>> engines;
};

// The rank's tensors of a plan as the harness of the CPU path fills them.
inline RankCase int64_case(const Plan& plan, const RankRounds& rounds, int32_t rank) {
  const Problem& problem = plan.problems.front();
  RankCase part;
  LocalTensor source = make_local(shard_of(problem.src, problem.shape, rank), problem.shape, true);
  const Shard destination = shard_of(problem.dst, problem.shape, rank);
  std::vector<int64_t> expected = make_local(destination, problem.shape, true).data;
  for (const Placement& placement : problem.src.placements) {
    if (placement.kind != PlacementKind::Partial) continue;
    for (int64_t& x : source.data) x = value_of(x, contribution_of(problem.src, rank));
    for (int64_t& x : expected) x = x < 0 ? x : reduced(x, contributions_of(problem.src), placement.op);
    break;
  }
  part.source = std::make_shared<GpuTensor>(source.data);
  part.destination = std::make_shared<GpuTensor>(make_local(destination, problem.shape, false).data);
  part.expected = GpuTensor::bytes_of(expected);
  part.rounds = std::make_shared<const RankRounds>(rounds);
  return part;
}

inline std::string text_of(const std::exception_ptr& error, ErrorKind kind) {
  REQUIRE(error);
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    CHECK(e.kind() == kind);
    return e.what();
  }
}

// A chain of three ranks, enqueued by all of them.
struct ChainWorld {
  World world{3};
  Plan plan = chain_plan(3, 64 * 8, 512);
  std::vector<RankCase> parts;

  explicit ChainWorld(const std::map<int32_t, std::chrono::milliseconds>& limits = {}) {
    RoundOptions options;
    options.round_ns = 1;
    const auto ranks = rounds_of_all(plan, 3, options);
    for (int32_t rank = 0; rank < 3; ++rank) {
      parts.push_back(int64_case(plan, ranks[static_cast<size_t>(rank)], rank));
      const auto limit = limits.find(rank);
      world.start(rank, parts.back(), 4, limit == limits.end() ? kLong : limit->second);
    }
  }
};

}  // namespace meshcast::testing
