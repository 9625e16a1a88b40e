// Whether ranks can open each other's memory and events, as they find out before they rely on it.
#include "ipc/ipc_proof.h"

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>

#include "catch.h"
#include "ipc/fake_ipc.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

using std::chrono::milliseconds;

struct Provers {
  FakeHost host{2};
  FakeIpcDevice mine{host, 0}, theirs{host, 1};
  std::mt19937 rng{1};

  // What rank 0 finds of rank 1's card, while both GPUs go on.
  std::string check(const std::string& card, IpcProof& proof, milliseconds limit = milliseconds(60'000)) {
    std::atomic<bool> done = false;
    std::thread gpus([&] {
      while (!done) {
        {
          const std::lock_guard lock(host.mutex);
          host.cluster.run(rng, 3);
        }
        std::this_thread::yield();
      }
    });
    const std::string found = proof.check(card, Clock::now() + limit);
    done = true;
    gpus.join();
    return found;
  }
  int64_t mapped() const {
    int64_t out = 0;
    for (const auto& [where, count] : host.mapped) out += count;
    return out;
  }
};

}  // namespace

TEST_CASE("ranks that open each other's memory find what was written there, and close it", "[ipc]") {
  Provers both;
  {
    IpcProof own(both.mine.driver, both.mine);
    const IpcProof other(both.theirs.driver, both.theirs);
    CHECK(own.card() != other.card());
    for (int again = 0; again < 2; ++again) CHECK(both.check(other.card(), own).empty());
    CHECK(both.host.opened == 2);
    CHECK(both.mapped() == 0);
  }
  both.host.cluster.run(both.rng);
  for (const auto& rank : both.host.cluster.ranks) CHECK(rank.events_alive == 0);
  CHECK(both.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("memory that cannot be opened is named with CUDA's reason", "[ipc]") {
  Provers both;
  both.host.apart = true;
  IpcProof own(both.mine.driver, both.mine);
  const IpcProof other(both.theirs.driver, both.theirs);
  const bool events = GENERATE(false, true);  // the memory can be opened, its event cannot
  CAPTURE(events);
  both.host.memory_apart = !events;
  CHECK(both.check(other.card(), own) == "CUDA opens nothing of another namespace");
  CHECK(both.mapped() == 0);
}

TEST_CASE("memory that is not that of the card is told by its bytes", "[ipc]") {
  Provers both;
  IpcProof own(both.mine.driver, both.mine);
  const IpcProof other(both.theirs.driver, both.theirs);
  {
    const std::lock_guard lock(both.host.mutex);
    both.host.cluster.run(both.rng);
    for (auto& [base, allocation] : both.host.allocations) std::memset(base, 0x11, 8);
  }
  CHECK(both.check(other.card(), own) == "other bytes are there than it has written");
  CHECK(both.mapped() == 0);
}

TEST_CASE("a GPU that does not come to write is not waited for past the limit", "[ipc]") {
  Provers both;
  IpcProof own(both.mine.driver, both.mine);
  FakeCluster::Item held;
  held.kind = FakeCluster::Item::Kind::Wait;
  bool goes = false;
  held.until = [&goes] { return goes; };
  both.host.cluster.rank(1).streams[FakeCluster::kTransfer].push_back(std::move(held));
  const IpcProof other(both.theirs.driver, both.theirs);
  CHECK(both.check(other.card(), own, milliseconds(30)) == "its GPU did not write a few bytes in time");
  CHECK(both.mapped() == 0);
  goes = true;
  CHECK(both.host.cluster.run(both.rng));
  CHECK(both.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("cards of another version are refused", "[ipc]") {
  Provers both;
  IpcProof own(both.mine.driver, both.mine);
  std::string card = own.card();
  CHECK(own.check(card + "x", Clock::now()).find("another version") != std::string::npos);
  ++card[0];
  CHECK(own.check(card, Clock::now()).find("another version") != std::string::npos);
}
