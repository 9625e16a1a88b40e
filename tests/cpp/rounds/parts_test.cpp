// Parts of the engine of rounds by themselves: its queue, and the memory that its schedules share.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "catch.h"
#include "rounds/cases.h"
#include "rounds/planned_rounds.h"
#include "rounds/rank_rounds.h"
#include "rounds/staging_arena.h"
#include "rounds/start_queue.h"

using namespace meshcast;

TEST_CASE("a queue that ends has done all of its jobs, in their order", "[rounds]") {
  std::vector<int> done;
  std::atomic<bool> waiting = true;
  std::thread late;
  {
    StartQueue queue;
    queue.push([&] {
      while (waiting) std::this_thread::yield();
    });
    for (int job = 0; job < 100; ++job) queue.push([&done, job] { done.push_back(job); });
    late = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the queue is being ended by then
      waiting = false;
    });
  }
  late.join();
  REQUIRE(done.size() == 100);
  for (int job = 0; job < 100; ++job) CHECK(done[static_cast<size_t>(job)] == job);
}

TEST_CASE("memory that is taken again in pieces tells each of them what used it", "[rounds]") {
  StagingArena arena;
  constexpr int64_t kUnit = kStagingAlignment;
  const StagingArena::Buffer whole = arena.take(4 * kUnit, 0, 0);
  CHECK(whole.before.exchange == -1);
  CHECK(whole.before.mark == -1);
  arena.used(whole.offset, {3, -1});
  arena.used(whole.offset, {1, 5});
  for (int32_t piece = 0; piece < 3; ++piece) {
    const StagingArena::Buffer buffer = arena.take(piece == 2 ? 3 * kUnit : kUnit - 1, 1 + piece, 9);
    CAPTURE(piece);
    CHECK(buffer.offset == piece * kUnit);
    CHECK(buffer.before.exchange == 3);
    CHECK(buffer.before.mark == 5);
  }
  CHECK(arena.size() == 5 * kUnit);
  const StagingArena::Buffer behind = arena.take(1, 4, 9);  // where nothing has been
  CHECK(behind.offset == 5 * kUnit);
  CHECK(behind.before.exchange == -1);
}

TEST_CASE("a plan's rounds are made once for each form of its tensors, as long as it is used", "[rounds]") {
  const auto plan = std::make_shared<const Plan>(testing::chain_plan(3, 1000));
  PlannedRounds planned(plan, 1, {0, 1, 2}, {});
  TensorForms forms = testing::row_major_forms(*plan, 1);
  const auto first = planned.of(forms);
  CHECK(first->forms == forms);
  CHECK(planned.of(forms) == first);
  TensorForms other = forms;
  for (int64_t stride = 2; stride < 9; ++stride) {
    other.destination[0].stride[0] = stride * 8;
    CHECK(planned.of(other)->forms == other);
    CHECK(planned.of(forms) == first);
  }
  // Eight are kept: of eight new ones, the last takes the place of the first.
  for (int64_t stride = 10; stride < 18; ++stride) {
    other.destination[0].stride[0] = stride * 8;
    planned.of(other);
  }
  CHECK(planned.of(forms) != first);
}
