// Rounds over the protocol of CUDA IPC, on GPUs that are faked: bytes against the true values, deaths,
// deadlines.
#include <chrono>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "ipc/fake_ipc.h"
#include "rounds/cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

using std::chrono::milliseconds;

int64_t open_files() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

// Half of the tensors are in memory that no other process can map.
void show_memory(IpcWorld& world, const RankCase& part, bool exportable) {
  auto& memory = part.source->memory;
  if (!memory.empty()) world.host.allocate(memory.data(), static_cast<int64_t>(memory.size()), exportable);
}

void hide_memory(IpcWorld& world, const RankCase& part) {
  if (!part.source->memory.empty()) world.host.free(part.source->memory.data());
}

bool all_ended(const std::vector<RankCase>& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [](const auto& part) { return part.run && part.run->ended(); });
}

// Each rank is a thread that starts one or two runs and joins them later; returns whether all bytes are right.
bool move_random_plans(IpcWorld& world, std::mt19937& rng, int64_t* exchanges) {
  const auto size = static_cast<int>(world.group.size());
  const int runs = 1 + static_cast<int>(rng() % 2);
  std::vector<std::vector<RankCase>> parts(static_cast<size_t>(runs));
  for (auto& of_run : parts) {
    const Plan plan = random_case(rng, size);
    const auto ranks = rounds_of_all(plan, size, random_options(rng));
    for (const int32_t rank : world.group) {
      of_run.push_back(int64_case(plan, ranks[static_cast<size_t>(rank)], rank));
      show_memory(world, of_run.back(), rng() % 2 == 0);
      *exchanges += static_cast<int64_t>(exchanges_of(*of_run.back().rounds).size());
    }
  }
  std::atomic<size_t> through = 0;
  std::vector<std::thread> ranks;
  for (const int32_t rank : world.group) {
    ranks.emplace_back([&, rank] {
      const auto of = [&](int run) -> RankCase& {
        return parts[static_cast<size_t>(run)][static_cast<size_t>(rank)];
      };
      for (int run = 0; run < runs; ++run) world.start(rank, of(run), run);
      for (int run = 0; run < runs; ++run) world.join(rank, of(run));
      ++through;
    });
  }
  const bool in_time = world.run_until(rng, [&] {
    return through == world.group.size() &&
           std::all_of(parts.begin(), parts.end(), [](const auto& of_run) { return all_ended(of_run); });
  });
  for (std::thread& thread : ranks) thread.join();
  REQUIRE(in_time);
  {
    const std::lock_guard lock(world.host.mutex);
    REQUIRE(world.host.cluster.run(rng));
  }
  bool right = true;
  for (const auto& of_run : parts) {
    for (const RankCase& part : of_run) {
      REQUIRE_FALSE(part.run->error());
      right = right && part.destination->seen == part.expected;
      hide_memory(world, part);
    }
  }
  return right;
}

void check_random_runs(uint32_t seed, int count) {
  CAPTURE(seed);
  std::mt19937 rng(seed);
  int64_t bounced = 0;
  int64_t opened = 0;
  for (int number = 0; number < count; ++number) {
    const int size = 3 + 2 * static_cast<int>(rng() % 3);
    CAPTURE(number, size);
    IpcWorld world(size);
    int64_t exchanges = 0;
    // Memory is freed and comes back at the same addresses, as something else.
    for (int again = 0; again < 3; ++again) REQUIRE(move_random_plans(world, rng, &exchanges));
    REQUIRE(world.host.cluster.mistakes == std::vector<std::string>{});
    int64_t groups = 0;
    for (const auto& device : world.devices) groups += device->started;
    REQUIRE(groups == exchanges);
    bounced += world.host.bounced;
    opened += world.host.opened;
    for (const auto& device : world.devices) device->groups->close();
    for (const auto& [where, count_mapped] : world.host.mapped) REQUIRE(count_mapped == 0);
    world.engines.clear();
    for (const auto& device : world.devices) device->groups.reset();
    for (const auto& rank : world.host.cluster.ranks) REQUIRE(rank.events_alive == 0);
  }
  CHECK(bounced > 0);
  CHECK(opened > 0);
}

// A chain of three ranks, whose parts nobody has started.
struct Chain {
  IpcWorld world{3};
  Plan plan = chain_plan(3, 64 * 8, 512);
  std::vector<RankCase> parts;

  Chain() {
    RoundOptions options;
    options.round_ns = 1;
    const auto ranks = rounds_of_all(plan, 3, options);
    for (int32_t rank = 0; rank < 3; ++rank) {
      parts.push_back(int64_case(plan, ranks[static_cast<size_t>(rank)], rank));
      show_memory(world, parts.back(), true);
    }
  }
  void start(int32_t rank, milliseconds limit = kLong) {
    world.start(rank, parts[static_cast<size_t>(rank)], 4, limit);
  }
  RoundRun& run(int32_t rank) { return *parts[static_cast<size_t>(rank)].run; }
};

}  // namespace

TEST_CASE("random rounds move the right bytes over CUDA IPC", "[ipc]") {
  check_random_runs(GENERATE(1U, 2U, 3U, 4U), 25);
}

TEST_CASE("very many random rounds move the right bytes over CUDA IPC", "[ipc][.][slow]") {
  check_random_runs(GENERATE(11U, 12U, 13U, 14U), 200);
}

TEST_CASE("a wait for an event that CUDA IPC loses shows in the bytes", "[ipc]") {
  std::mt19937 rng(3);
  const auto lost = GENERATE(FakeHost::Lost::Ready, FakeHost::Lost::Copied);
  // Not always: some plans move nothing, and some orders spoil nothing.
  int worlds = 0;
  int wrong = 0;
  for (; worlds < 200 && wrong < 8; ++worlds) {
    IpcWorld world(5);
    world.host.lost = lost;
    int64_t exchanges = 0;
    wrong += !move_random_plans(world, rng, &exchanges);
  }
  CAPTURE(worlds);
  CHECK(wrong == 8);
}

TEST_CASE("who calls waits for nobody's call, and who joins waits for the calls alone", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  chain.start(0);
  chain.start(1);
  CHECK_FALSE(chain.world.run_until(
      rng, [&] { return chain.run(0).ended(); }, milliseconds(50)));
  std::atomic<bool> joined = false;
  std::thread user([&] {
    chain.world.join(0, chain.parts[0]);
    joined = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK_FALSE(joined);
  chain.start(2);
  user.join();  // the GPUs stand still meanwhile
  CHECK_FALSE(chain.run(0).ended());
  chain.world.join(1, chain.parts[1]);
  chain.world.join(2, chain.parts[2]);
  CHECK(chain.world.run_until(rng, [&] { return all_ended(chain.parts); }));
  CHECK(chain.world.host.cluster.run(rng));
  for (const RankCase& part : chain.parts) CHECK(part.destination->seen == part.expected);
  CHECK(chain.world.host.cluster.mistakes.empty());
}

TEST_CASE("a rank that is late is looked for less and less often", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  chain.start(0);
  chain.start(1);
  std::this_thread::sleep_for(milliseconds(100));
  const TimePoint begun = Clock::now();
  const int64_t before = chain.world.devices[1]->looks;
  std::this_thread::sleep_for(milliseconds(100));
  const int64_t looks = chain.world.devices[1]->looks - before;
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begun).count();
  CAPTURE(looks, waited);
  CHECK(looks <= waited);  // a pause is 2 ms by now
  chain.start(2);
  for (const int32_t rank : chain.world.group) chain.world.join(rank, chain.parts[static_cast<size_t>(rank)]);
  CHECK(chain.world.run_until(rng, [&] { return all_ended(chain.parts); }));
  CHECK(chain.world.host.cluster.run(rng));
  for (const RankCase& part : chain.parts) CHECK(part.destination->seen == part.expected);
}

TEST_CASE("a rank that never calls ends the others at their deadline over CUDA IPC", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  chain.start(0, milliseconds(100));
  chain.start(1, milliseconds(100));
  CHECK(chain.world.run_until(rng, [&] { return chain.run(0).ended() && chain.run(1).ended(); }));
  int late = 0;
  for (const int32_t rank : {0, 1}) {
    // The first to give up is lost to the other, whose own limit may not be over yet.
    try {
      std::rethrow_exception(chain.run(rank).error());
    } catch (const Error& error) {
      const std::string text = error.what();
      CAPTURE(text);
      if (error.kind() == ErrorKind::DeadlineExceeded) {
        ++late;
        // The limit is counted from a moment before the one that the text counts from.
        const bool in_time =
            text.find("after 0.1 s") != std::string::npos || text.find("after 0.09") != std::string::npos;
        CHECK(in_time);
      } else {
        CHECK(error.kind() == ErrorKind::PeerLost);
        CHECK(error.context().peer == 1 - rank);
      }
    }
    chain.world.join(rank, chain.parts[static_cast<size_t>(rank)]);  // does not hang
  }
  CHECK(late >= 1);
  // What was enqueued ends, and the tensors are let go of.
  CHECK(chain.world.run_until(
      rng, [&] { return chain.world.engines[0]->idle() && chain.world.engines[1]->idle(); }));
  CHECK(chain.world.host.cluster.run(rng));
  CHECK(chain.parts[0].source.use_count() == 1);
}

TEST_CASE("a rank that dies is named by the others over CUDA IPC", "[ipc]") {
  const int seed = GENERATE(1, 2, 3, 4, 5, 6);
  CAPTURE(seed);
  std::mt19937 rng(static_cast<uint32_t>(seed));
  Chain chain;
  const auto victim = static_cast<int32_t>(rng() % 3);
  for (int32_t rank = 0; rank < 3; ++rank)
    if (rank != victim || seed % 2 == 0) chain.start(rank);
  {
    const std::lock_guard lock(chain.world.host.mutex);
    chain.world.host.cluster.run(rng, static_cast<int64_t>(rng() % 60));
  }
  // As its process would: without a word. What its GPU has done stays, the rest is never done.
  chain.world.engines[static_cast<size_t>(victim)].reset();
  chain.world.devices[static_cast<size_t>(victim)]->abort();
  const auto others_ended = [&] {
    for (int32_t rank = 0; rank < 3; ++rank)
      if (rank != victim && !chain.run(rank).ended()) return false;
    return true;
  };
  CHECK(chain.world.run_until(rng, others_ended));
  for (int32_t rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    if (!chain.run(rank).error()) continue;  // had all it needed before
    const std::string text = text_of(chain.run(rank).error(), ErrorKind::PeerLost);
    CHECK(text.find("failed in cuda_ipc while") != std::string::npos);
    CHECK(text.find("has ended, or has given its group up") != std::string::npos);
  }
}

TEST_CASE("bytes that a peer may have torn do not pass for a result", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  for (int32_t rank = 0; rank < 3; ++rank) chain.start(rank);
  for (int32_t rank = 0; rank < 3; ++rank) chain.world.join(rank, chain.parts[static_cast<size_t>(rank)]);
  // All is enqueued everywhere. Rank 0 gives up, and its user writes where rank 1's GPU will read.
  chain.world.engines[0]->fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "given up")));
  const auto memory = chain.parts[0].source;
  std::fill(memory->written.begin(), memory->written.end(), std::byte{0x66});
  {
    const std::lock_guard lock(chain.world.host.mutex);
    CHECK(chain.world.host.cluster.run(rng));
  }
  for (const auto& engine : chain.world.engines) engine->poll(Clock::now());
  CHECK(chain.parts[1].destination->seen != chain.parts[1].expected);
  const std::string text = text_of(chain.run(1).error(), ErrorKind::PeerLost);
  CHECK(text.find("rank 0 has ended, or has given its group up") != std::string::npos);
}

TEST_CASE("an engine that has failed speaks to nobody once it is drained", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  std::atomic<bool> here = true;
  std::atomic<int> late = 0;
  const auto device = chain.world.devices[0];
  chain.world.engines[0] = std::make_unique<RoundEngine>(
      device, 0, chain.world.group,
      RoundObserver{[] {}, [&](const Error&, const std::shared_ptr<RoundRun>&) { late += !here; }});
  chain.start(0);
  std::this_thread::sleep_for(milliseconds(5));
  chain.world.devices[1]->abort();  // which rank 0's thread will want to tell
  chain.world.engines[0]->fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "shut down")));
  chain.world.engines[0]->drain();
  here = false;
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(late == 0);
  CHECK(text_of(chain.run(0).error(), ErrorKind::Aborted) == "shut down");
  chain.world.join(0, chain.parts[0]);
  CHECK(chain.world.run_until(rng, [&] { return chain.world.engines[0]->idle(); }));
}

TEST_CASE("an engine that is drained, or closed, has let its observer return", "[ipc]") {
  const bool closed = GENERATE(false, true);
  std::mt19937 rng(1);
  Chain chain;
  std::atomic<bool> inside = false;
  const auto slow = [&](const Error&, const std::shared_ptr<RoundRun>&) {
    if (inside.exchange(true)) return;  // told by poll() as well
    std::this_thread::sleep_for(milliseconds(100));
    inside = false;
  };
  auto& engine = chain.world.engines[0];
  engine =
      std::make_unique<RoundEngine>(chain.world.devices[0], 0, chain.world.group, RoundObserver{[] {}, slow});
  chain.start(0);
  chain.world.devices[1]->abort();  // which rank 0's thread tells
  const TimePoint limit = Clock::now() + std::chrono::seconds(30);
  while (!inside && Clock::now() < limit) std::this_thread::yield();
  REQUIRE(inside);
  if (closed) {
    engine.reset();
  } else {
    engine->fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "shut down")));
    engine->drain();
  }
  CHECK_FALSE(inside);
  text_of(chain.run(0).error(), ErrorKind::Aborted);
  if (!closed) CHECK(chain.world.run_until(rng, [&] { return engine->idle(); }));
  CHECK(chain.world.host.cluster.run(rng));
  CHECK(chain.world.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("what the engine's own thread could not enqueue is told to the observer", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  std::vector<std::string> heard;
  std::shared_ptr<RoundRun> of;
  RoundEngine* engine = nullptr;
  chain.world.engines[0] = std::make_unique<RoundEngine>(
      chain.world.devices[0], 0, chain.world.group,
      RoundObserver{[] {},
                    [&](const Error& error, const std::shared_ptr<RoundRun>& run) {
                      of = run;
                      heard.emplace_back(error.what());
                      engine->fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "named")));
                    }});
  engine = chain.world.engines[0].get();
  RankRounds broken = *chain.parts[0].rounds;
  REQUIRE_FALSE(broken.messages.empty());
  for (RoundMessage& message : broken.messages) message.peer = 7;  // no Error of its own, but a logic_error
  chain.parts[0].rounds = std::make_shared<const RankRounds>(broken);
  chain.start(0);
  chain.world.join(0, chain.parts[0]);  // which nobody else could raise it to
  CHECK(of == chain.parts[0].run);
  CHECK(heard == std::vector<std::string>{"rank 0: test number 4 could not be enqueued: rank 7 of the group "
                                          "is no peer of this one"});
  CHECK(text_of(chain.run(0).error(), ErrorKind::Aborted) == "named");
  CHECK(chain.world.run_until(rng, [&] { return chain.world.engines[0]->idle(); }));
  CHECK(chain.world.host.cluster.run(rng));
}

TEST_CASE("different rounds on two ranks are found over CUDA IPC", "[ipc]") {
  std::mt19937 rng(1);
  Chain chain;
  const Plan other = chain_plan(3, 64 * 8 * 2, 1024);
  RoundOptions options;
  options.round_ns = 1;
  chain.parts[1] = int64_case(other, rounds_of_all(other, 3, options)[1], 1);
  for (int32_t rank = 0; rank < 3; ++rank) chain.start(rank);
  CHECK(chain.world.run_until(rng, [&] { return all_ended(chain.parts); }));
  int found = 0;
  for (const RankCase& part : chain.parts) {
    try {
      std::rethrow_exception(part.run->error());
    } catch (const Error& error) {
      found += std::string(error.what()).find("the ranks do not run the same rounds") != std::string::npos;
    }
  }
  CHECK(found >= 1);
}

TEST_CASE("worlds over CUDA IPC leave no file behind", "[ipc]") {
  std::mt19937 rng(1);
  {
    Chain first;  // what is made once stays
  }
  const int64_t before = open_files();
  for (int number = 0; number < 3; ++number) {
    Chain chain;
    for (int32_t rank = 0; rank < 3; ++rank) chain.start(rank);
    if (number > 0) CHECK(chain.world.run_until(rng, [&] { return all_ended(chain.parts); }));
  }
  CHECK(open_files() == before);
}
