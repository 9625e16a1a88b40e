#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "run/harness.h"
#include "run/random_plans.h"

using namespace meshcast;
using namespace meshcast::testing;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLimit(20000);  // of a run; a test that hangs fails here

// World sizes 2..7 with their ranks spread over hosts of different size.
std::vector<std::vector<int32_t>> random_hosts(std::mt19937& rng, int world) {
  std::vector<std::vector<int32_t>> hosts;
  for (int32_t rank = 0; rank < world; ++rank) {
    if (hosts.empty() || rng() % 3 == 0) hosts.emplace_back();
    hosts[rng() % hosts.size()].push_back(rank);
  }
  return hosts;
}

void check(std::vector<RankRun>& runs) {
  for (size_t i = 0; i < runs.size(); ++i) {
    INFO("run " << i);
    REQUIRE(runs[i].run->wait_until(Clock::now() + kLimit));
    REQUIRE_FALSE(runs[i].run->error());
    REQUIRE(runs[i].destination.data == runs[i].expected);
  }
}

}  // namespace

TEST_CASE("shared memory: random plans over random hosts fill every destination", "[exec][shm]") {
  const uint32_t seed = 3;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 80; ++round) {
    const int world = 2 + static_cast<int>(rng() % 6);
    Cluster cluster(world, nullptr, random_hosts(rng, world), nullptr, round % 2 == 0);
    // Some plans are in flight at once, and every rank starts all of its runs before the next starts any.
    std::vector<Plan> plans;
    for (int i = 0; i < 3; ++i) plans.push_back(random_plan(rng, world));
    INFO("round " << round << ", world " << world);
    std::vector<RankRun> runs;
    for (int rank = 0; rank < world; ++rank) {
      for (int i = 0; i < 3; ++i)
        runs.push_back(start_rank(cluster, plans[static_cast<size_t>(i)], rank, label(i), kLimit));
    }
    check(runs);
  }
}

TEST_CASE("shared memory: a chain inside a host is one message, sent once", "[exec][shm]") {
  const Plan plan = chain_plan(5, 1000);
  const std::vector<int32_t> group{0, 1, 2, 3, 4};
  const Program root = project(plan, 0, group, {0, 1, 2, 3});
  REQUIRE_FALSE(root.sends.empty());
  int64_t local = 0;
  for (const SendOp& op : root.sends) {
    if (!op.local) continue;
    ++local;
    CHECK(op.targets.size() == 3);
    CHECK_FALSE(op.forward);
  }
  CHECK(local == static_cast<int64_t>(plan.chunks.size()));
  for (const int32_t rank : {1, 2, 3}) {
    for (const SendOp& op : project(plan, rank, group, {0, 1, 2, 3}).sends) CHECK_FALSE(op.local);
  }
}

TEST_CASE("shared memory: messages far larger than the slots pass", "[exec][shm]") {
  const int world = 4;
  Cluster cluster(world, nullptr, {{0, 1, 2, 3}});
  const Plan plan = chain_plan(world, int64_t{3} << 20, int64_t{8} << 20);  // 24 MiB in chunks of 8 MiB
  for (int number = 0; number < 3; ++number) {
    std::vector<RankRun> runs;
    for (int rank = 0; rank < world; ++rank)
      runs.push_back(start_rank(cluster, plan, rank, label(number), kLimit));
    check(runs);
  }
}

TEST_CASE("shared memory: more messages than any queue holds, before their receiver comes", "[exec][shm]") {
  const int world = 2;
  Cluster cluster(world, nullptr, {{0, 1}});
  const Plan plan = chain_plan(world, 1000);
  std::vector<RankRun> runs;
  // In turn: all sends before all receives, then the other way round; lanes make the posts pile up.
  for (const int first : {0, 1}) {
    for (int number = 0; number < 40; ++number)
      runs.push_back(start_rank(cluster, plan, first, label(40 * first + number, number), kLimit));
    for (int number = 0; number < 40; ++number)
      runs.push_back(start_rank(cluster, plan, 1 - first, label(40 * first + number, number), kLimit));
  }
  check(runs);
}

TEST_CASE("shared memory: a run that is repeated under its name does not meet itself", "[exec][shm]") {
  Cluster cluster(2, nullptr, {{0, 1}});
  const Plan plan = chain_plan(2, 1000);
  RunLabel name = label(3);
  name.reverse = true;
  std::vector<RankRun> runs;
  for (const int rank : {0, 1}) {
    for (int i = 0; i < 100; ++i) runs.push_back(start_rank(cluster, plan, rank, name, kLimit));
  }
  check(runs);
}

TEST_CASE("shared memory: a sender that is far ahead does not meet runs whose number wrapped around",
          "[exec][shm]") {
  Cluster cluster(2, nullptr, {{0, 1}});
  const Plan plan = chain_plan(2, 100);
  std::vector<RankRun> runs;
  for (const int rank : {0, 1}) {
    for (const int number : {7, 7 + (1 << 8), 7 + (1 << 16), 7 + (1 << 20)})
      runs.push_back(start_rank(cluster, plan, rank, label(number), kLimit));
  }
  check(runs);
}

TEST_CASE("shared memory: receives of many lanes that find no room are posted later", "[exec][shm]") {
  // 16 lanes post 16 receives each, twice what the queue holds, before their sender comes. It sends in the last
  // lane first, whose receives stand behind those that find no room.
  const int lanes = 16;
  for (int round = 0; round < 20; ++round) {
    Cluster cluster(2, nullptr, {{0, 1}});
    const Plan plan = chain_plan(2, 1280);  // 20 messages
    std::vector<RankRun> receivers;
    for (int lane = 0; lane < lanes; ++lane)
      receivers.push_back(start_rank(cluster, plan, 1, label(lane, lane), kLimit));
    for (int lane = lanes - 1; lane >= 0; --lane) {
      std::vector<RankRun> sender;
      sender.push_back(start_rank(cluster, plan, 0, label(lane, lane), kLimit));
      check(sender);
    }
    check(receivers);
  }
}

TEST_CASE("shared memory: a queue tells that it was full until its consumer made room", "[exec][shm]") {
  ShmQueue<int, 4> queue;
  int item = 0;
  for (int i = 0; i < 3; ++i) queue.push(i);
  REQUIRE(queue.pop(&item));
  CHECK_FALSE(queue.was_full());
  queue.push(3);
  queue.push(4);
  CHECK(queue.full());
  REQUIRE(queue.pop(&item));
  CHECK(queue.was_full());
  REQUIRE(queue.pop(&item));
  CHECK_FALSE(queue.was_full());
  CHECK(item == 2);
}

namespace {

// Either end of a message: what became of it.
struct Outcome {
  std::promise<std::string> text;
  std::future<std::string> future = text.get_future();

  std::string get() {
    REQUIRE(future.wait_for(kLimit) == std::future_status::ready);
    return future.get();
  }
};

class Probe final : public Outgoing, public Incoming {
 public:
  explicit Probe(std::shared_ptr<Outcome> outcome) : outcome_(std::move(outcome)) {}
  void read(int64_t, int64_t nbytes, std::byte* out) override { std::fill_n(out, nbytes, std::byte{1}); }
  void write(int64_t, int64_t, const std::byte*) override {}
  void finished() override { outcome_->text.set_value("finished"); }
  void failed(int, const TransportError& error) override { outcome_->text.set_value(error.what()); }

 private:
  std::shared_ptr<Outcome> outcome_;
};

// A message that is put together before it is combined, for which there is no memory.
class Starved final : public Incoming {
 public:
  explicit Starved(std::shared_ptr<Outcome> outcome) : outcome_(std::move(outcome)) {}
  void write(int64_t, int64_t, const std::byte*) override { throw std::bad_alloc(); }
  void finished() override { outcome_->text.set_value("finished"); }
  void failed(int peer, const TransportError& error) override {
    outcome_->text.set_value(std::to_string(peer) + ": " + error.what());
  }

 private:
  std::shared_ptr<Outcome> outcome_;
};

}  // namespace

TEST_CASE("shared memory: a message that there is no memory for fails alone", "[exec][shm]") {
  auto ranks = connect_local(2, {0, 1});
  const auto sent = std::make_shared<Outcome>();
  const auto received = std::make_shared<Outcome>();
  ranks[1]->recv(0, 5, 8, std::make_unique<Starved>(received));
  ranks[0]->send({{1, 5}}, 8, std::make_unique<Probe>(sent));
  CHECK(received->get() == "0: no memory for a message");
  CHECK(sent->get() == "finished");
  const auto there = std::make_shared<Outcome>();
  const auto here = std::make_shared<Outcome>();
  ranks[0]->send({{1, 6}}, 8, std::make_unique<Probe>(there));
  ranks[1]->recv(0, 6, 8, std::make_unique<Probe>(here));
  CHECK(there->get() == "finished");
  CHECK(here->get() == "finished");
}

TEST_CASE("shared memory: a key that is used twice at a time is refused, never lost", "[exec][shm]") {
  const auto make = [] { return std::make_shared<Outcome>(); };
  {
    auto ranks = connect_local(2, {0, 1});
    const auto first = make();
    const auto second = make();
    const auto received = make();
    ranks[0]->send({{1, 5}}, 8, std::make_unique<Probe>(first));
    ranks[0]->send({{1, 5}}, 8, std::make_unique<Probe>(second));
    CHECK(second->get().find("one key") != std::string::npos);
    ranks[1]->recv(0, 5, 8, std::make_unique<Probe>(received));
    CHECK(first->get() == "finished");
    CHECK(received->get() == "finished");
  }
  {
    auto ranks = connect_local(2, {0, 1});
    const auto first = make();
    const auto second = make();
    ranks[1]->recv(0, 5, 8, std::make_unique<Probe>(first));
    ranks[1]->recv(0, 5, 8, std::make_unique<Probe>(second));
    CHECK(first->get().find("one key") != std::string::npos);
    CHECK(second->get().find("one key") != std::string::npos);
  }
}

// The peer's memory may hold anything: its process may be failing right now.
TEST_CASE("shared memory: a queue whose counts make no sense ends its link alone", "[exec][shm]") {
  const auto make = [] { return std::make_shared<Outcome>(); };
  const auto write_tail = [](auto& queue, uint64_t tail) {
    reinterpret_cast<std::atomic<uint64_t>*>(reinterpret_cast<std::byte*>(&queue) + 64)->store(tail);
  };
  for (const uint64_t tail : {uint64_t{1} << 40, ~uint64_t{0}, uint64_t{kMaxPosts} + 1}) {
    auto met = meet_local(3, {0, 1, 2}, false);
    ShmMembership bad = std::move(met[1]);
    const auto good = make_shm_transport(std::move(met[0]));
    const auto other = make_shm_transport(std::move(met[2]));
    // Of rank 1: receives that it posts with rank 0, and fragments of its messages to it.
    ShmLink& link = *bad.links[0];
    REQUIRE(link.rank() == 0);
    const auto sent = make();
    const auto received = make();
    good->recv(1, 6, 8, std::make_unique<Probe>(received));
    write_tail(link.region().mailbox(bad.mailbox[0]).posts, tail);
    write_tail(bad.own->mailbox(0).fragments, tail);
    link.call(ShmHalf::Sending);
    link.call(ShmHalf::Receiving);
    good->send({{1, 5}}, 8, std::make_unique<Probe>(sent));
    CHECK(sent->get().find("makes no sense") != std::string::npos);
    CHECK(received->get().find("makes no sense") != std::string::npos);
    // Others go on.
    const auto there = make();
    const auto here = make();
    good->send({{2, 7}}, 8, std::make_unique<Probe>(there));
    other->recv(0, 7, 8, std::make_unique<Probe>(here));
    CHECK(there->get() == "finished");
    CHECK(here->get() == "finished");
  }
}

TEST_CASE("shared memory: a lane that waits does not hold up another", "[exec][shm]") {
  const int world = 3;
  Cluster cluster(world, nullptr, {{0, 1, 2}});
  const Plan plan = chain_plan(world, int64_t{1} << 20, int64_t{1} << 20);
  // Lane 0: more than all slots hold is sent to rank 2, which never posts it. Lane 1 must pass.
  std::vector<RankRun> waiting;
  for (int rank = 0; rank < 2; ++rank) waiting.push_back(start_rank(cluster, plan, rank, label(0, 0), kLimit));
  std::vector<RankRun> passing;
  for (int rank = 0; rank < world; ++rank)
    passing.push_back(start_rank(cluster, plan, rank, label(1, 1), kLimit));
  check(passing);
  for (const RankRun& part : waiting) CHECK_FALSE(part.run->ended());
}

TEST_CASE("shared memory: a peer that leaves fails the runs that need it", "[exec][shm]") {
  const int world = 3;
  Cluster cluster(world, nullptr, {{0, 1, 2}});
  const Plan plan = chain_plan(world, 1000);
  std::vector<RankRun> runs;
  for (int rank = 1; rank < world; ++rank) runs.push_back(start_rank(cluster, plan, rank, label(0), kLimit));
  for (const RankRun& part : runs) REQUIRE_FALSE(part.run->wait_until(Clock::now() + milliseconds(20)));
  cluster.engine(0).shutdown(std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "left")));
  for (int rank = 1; rank < world; ++rank) {
    cluster.engine(rank).check_local_peers();
    const Run& run = *runs[static_cast<size_t>(rank - 1)].run;
    REQUIRE(run.wait_until(Clock::now() + kLimit));
    REQUIRE(run.error());
  }
}

TEST_CASE("shared memory: what a peer sent before it left still arrives", "[exec][shm]") {
  Cluster cluster(2, nullptr, {{0, 1}});
  const Plan plan = chain_plan(2, int64_t{64} << 10, int64_t{512} << 10);
  for (int number = 0; number < 20; ++number) {
    RankRun receiver = start_rank(cluster, plan, 1, label(number), kLimit);
    RankRun sender = start_rank(cluster, plan, 0, label(number), kLimit);
    REQUIRE(sender.run->wait_until(Clock::now() + kLimit));
    if (number == 19) {
      cluster.engine(0).shutdown(
          std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "left")));
      cluster.engine(1).check_local_peers();
    }
    REQUIRE(receiver.run->wait_until(Clock::now() + kLimit));
    REQUIRE_FALSE(receiver.run->error());
    REQUIRE(receiver.destination.data == receiver.expected);
  }
}

TEST_CASE("shared memory: an abort ends runs in the middle of a transfer", "[exec][shm]") {
  for (int round = 0; round < 5; ++round) {
    Cluster cluster(3, nullptr, {{0, 1, 2}});
    const Plan plan = chain_plan(3, int64_t{2} << 20, int64_t{1} << 20);
    std::vector<RankRun> runs;
    for (int rank = 0; rank < 3; ++rank) runs.push_back(start_rank(cluster, plan, rank, label(0), kLimit));
    for (int rank = 0; rank < 3; ++rank) {
      cluster.engine(rank).fail(std::make_exception_ptr(TransportError(TransportError::Cause::Closed, "test")));
    }
    for (const RankRun& part : runs) REQUIRE(part.run->wait_until(Clock::now() + kLimit));
  }
}

TEST_CASE("shared memory: the budget bounds what a process maps", "[exec][shm]") {
  std::vector<std::unique_ptr<ShmRegion>> regions;
  int64_t total = 0;
  std::string refusal;
  while (refusal.empty() && regions.size() < 1000) {
    try {
      regions.push_back(ShmRegion::create(1));
      total += int64_t{regions.back()->slots()} * regions.back()->slot_bytes();
    } catch (const std::runtime_error& error) {
      refusal = error.what();
    }
  }
  CHECK(total <= int64_t{64} << 20);
  CHECK(regions.size() >= 16);
  CHECK(refusal.find("64 MiB") != std::string::npos);
  regions.clear();
  CHECK(ShmRegion::create(1)->slot_bytes() == 128 * 1024);
}

TEST_CASE("shared memory: a rendezvous that nobody comes to ends at its deadline", "[exec][shm]") {
  ShmRendezvous lower(2);
  const auto limit = Clock::now() + milliseconds(50);
  CHECK_THROWS_AS(lower.meet({{0, lower.address()}, {1, "meshcast-nobody"}}, 0, limit), std::runtime_error);
  ShmRendezvous upper(2);
  CHECK_THROWS_AS(upper.meet({{0, "meshcast-nobody"}, {1, upper.address()}}, 1, limit), std::runtime_error);
}
