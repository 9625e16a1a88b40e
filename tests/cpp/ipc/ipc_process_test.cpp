// Ranks as processes, which share nothing but sockets and what stands for the GPU: bytes, and deaths by
// SIGKILL.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "ipc/shared_gpu.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kLimit = seconds(60);

// One rank, in a process of its own.
class ProcessRank {
 public:
  ProcessRank(SharedMemory& memory, int32_t rank, int32_t size)
      : memory_(memory),
        rank_(rank),
        host_(size),
        device_(std::make_shared<FakeIpcDeviceOf<SharedIpcDriver>>(host_, rank, memory)),
        rng_(static_cast<uint32_t>(rank)) {
    IpcMeeting meeting;
    SharedGpu::Rank& me = memory_.gpu().rank(rank);
    std::memcpy(me.address, meeting.address().data(), meeting.address().size());
    me.listens = true;
    std::vector<std::string> addresses;
    std::vector<int32_t> group(static_cast<size_t>(size));
    std::iota(group.begin(), group.end(), 0);
    for (const int32_t other : group) {
      while (!memory_.gpu().rank(other).listens) std::this_thread::sleep_for(milliseconds(1));
      addresses.emplace_back(memory_.gpu().rank(other).address);
    }
    device_->groups =
        IpcExchange::connect(device_->driver, *device_, meeting, addresses, rank, Clock::now() + kLimit, [] {});
    engine_ = std::make_unique<RoundEngine>(device_, rank, group);
  }
  ~ProcessRank() {
    if (!engine_->error()) device_->groups->close();
    engine_.reset();
    device_->groups.reset();
  }

  // Throws the run's error, and where bytes are wrong.
  void move(const Plan& plan, const RoundOptions& options, bool exportable, int number) {
    const auto size = static_cast<int>(host_.cluster.ranks.size());
    RankCase part = int64_case(plan, rounds_of_all(plan, size, options)[static_cast<size_t>(rank_)], rank_);
    const std::vector<std::byte>& values = part.source->written;
    part.source->memory = values;
    part.destination->memory = part.destination->written;
    std::shared_ptr<std::byte> shown;  // the source, in memory that others can map
    if (exportable) shown = device_->driver.allocate_exportable(static_cast<int64_t>(values.size()) + 1);
    if (exportable) std::memcpy(shown.get(), values.data(), values.size());
    std::byte* const source = exportable ? shown.get() : part.source->memory.data();
    part.run = engine_->start(part.rounds, {{source}, {part.destination->memory.data()}, part.source},
                              FakeCluster::kGate, label(number), Clock::now() + kLimit);
    while (!part.run->ended()) {
      {
        const std::lock_guard lock(host_.mutex);
        host_.cluster.run(rng_, 1 + static_cast<int64_t>(rng_() % 40));
      }
      engine_->poll(Clock::now());
      std::this_thread::yield();
    }
    if (part.run->error()) std::rethrow_exception(part.run->error());
    if (part.destination->memory != part.expected) throw std::runtime_error("wrong bytes");
    if (!host_.cluster.mistakes.empty()) throw std::runtime_error(host_.cluster.mistakes.front());
    ++memory_.gpu().rank(rank_).plans;
  }

 private:
  SharedMemory& memory_;
  const int32_t rank_;
  FakeHost host_;
  std::shared_ptr<FakeIpcDeviceOf<SharedIpcDriver>> device_;
  std::mt19937 rng_;  // of the order in which its GPU does things
  std::unique_ptr<RoundEngine> engine_;
};

// A data loader, say: a child that outlives the rank and knows nothing of its sockets.
void fork_child(SharedGpu::Rank& me) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(static_cast<unsigned>(2 * kLimit.count()));
    for (;;) pause();
  }
  me.child = child;
}

// Runs `count` plans, which all ranks draw alike, as one process; how that ended goes into the shared memory.
[[noreturn]] void live(SharedMemory& memory, int32_t rank, int32_t size, uint32_t seed, int count, bool forks) {
  SharedGpu::Rank& me = memory.gpu().rank(rank);
  int status = 0;
  const auto failed = [&](const char* text) {
    std::snprintf(me.error, sizeof me.error, "%s", text);
    status = 1;
  };
  try {
    ProcessRank self(memory, rank, size);
    if (forks) fork_child(me);
    std::mt19937 rng(seed);
    for (int number = 0; number < count; ++number) {
      const Plan plan = random_case(rng, size);
      const RoundOptions options = random_options(rng);
      self.move(plan, options, rng() % 2 == 0, number);
    }
  } catch (const Error& error) {
    me.lost = error.kind() == ErrorKind::PeerLost ? error.context().peer : -2;
    failed(error.what());
  } catch (const std::exception& error) {
    failed(error.what());
  }
  _exit(status);
}

struct Processes {
  SharedMemory memory;
  std::vector<pid_t> pids;

  Processes(int32_t size, uint32_t seed, int count, bool forks = false) {
    for (int32_t rank = 0; rank < size; ++rank) {
      const pid_t pid = fork();
      REQUIRE(pid >= 0);
      if (pid == 0) live(memory, rank, size, seed, count, forks);
      pids.push_back(pid);
    }
  }
  ~Processes() {
    for (const pid_t pid : pids) {
      if (pid <= 0) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (size_t rank = 0; rank < pids.size(); ++rank) {
      const pid_t child = memory.gpu().rank(static_cast<int32_t>(rank)).child;
      if (child > 0) kill(child, SIGKILL);
    }
  }

  // The exit status, or minus the signal; a process that does not end in time is killed by the destructor.
  int end_of(int32_t rank) {
    pid_t& pid = pids[static_cast<size_t>(rank)];
    const TimePoint limit = Clock::now() + kLimit;
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
      if (Clock::now() >= limit) return 4711;
      std::this_thread::sleep_for(milliseconds(2));
    }
    pid = -1;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }
};

}  // namespace

TEST_CASE("random rounds move the right bytes between processes over CUDA IPC", "[ipc][processes]") {
  const auto seed = GENERATE(1U, 2U, 3U);
  const int32_t size = 1 + 2 * static_cast<int32_t>(seed);
  CAPTURE(seed, size);
  constexpr int kPlans = 40;
  Processes processes(size, seed, kPlans);
  for (int32_t rank = 0; rank < size; ++rank) {
    CAPTURE(rank);
    const int end = processes.end_of(rank);
    CHECK(std::string(processes.memory.gpu().rank(rank).error).empty());
    CHECK(end == 0);
    CHECK(processes.memory.gpu().rank(rank).plans == kPlans);
  }
}

TEST_CASE("processes survive the death of one, and say who it was", "[ipc][processes]") {
  const auto seed = GENERATE(1U, 2U, 3U, 4U, 5U, 6U);
  CAPTURE(seed);
  constexpr int32_t kSize = 3;
  std::mt19937 rng(seed);
  const auto victim = static_cast<int32_t>(rng() % kSize);
  Processes processes(kSize, seed, 1'000'000, seed % 2 == 0);
  // In the middle of something, whatever that is.
  const TimePoint limit = Clock::now() + kLimit;
  while (processes.memory.gpu().rank(victim).plans < 3 && Clock::now() < limit)
    std::this_thread::sleep_for(milliseconds(1));
  REQUIRE(processes.memory.gpu().rank(victim).plans >= 3);
  std::this_thread::sleep_for(std::chrono::microseconds(rng() % 3000));
  REQUIRE(kill(processes.pids[static_cast<size_t>(victim)], SIGKILL) == 0);
  CHECK(processes.end_of(victim) == -SIGKILL);
  int named = 0;
  for (int32_t rank = 0; rank < kSize; ++rank) {
    if (rank == victim) continue;
    CHECK(processes.end_of(rank) == 1);
    const SharedGpu::Rank& survivor = processes.memory.gpu().rank(rank);
    CAPTURE(rank, survivor.error);
    // The first to notice gives up, and may be what the other notices.
    CHECK(survivor.lost >= 0);
    CHECK(survivor.lost != rank);
    named += survivor.lost == victim;
  }
  CHECK(named >= 1);
}
