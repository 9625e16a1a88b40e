// The parts of CUDA IPC's protocol by themselves: what ranks remember of memory, full sockets, ends.
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "ipc/fake_ipc.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// Both ends of one group at a time, on GPUs that go on at once.
struct Pair {
  const std::unique_ptr<FakeHost> own;
  FakeHost& host;
  FakeIpcDevice from{host, 0}, to{host, 1};
  std::mt19937 rng{1};
  GroupOutcome sent, received;

  Pair() : own(std::make_unique<FakeHost>(2)), host(*own) { connect_both(); }
  explicit Pair(Pair& lane) : host(lane.host) { connect_both(); }  // another lane of the same ranks

  void connect_both() {
    IpcMeeting meetings[2];
    const std::vector<std::string> addresses{meetings[0].address(), meetings[1].address()};
    const auto connect = [&](FakeIpcDevice& device, int32_t rank) {
      device.groups = IpcExchange::connect(device.driver, device, meetings[rank], addresses, rank,
                                           Clock::now() + kLong, [] {});
    };
    std::thread other([&] { connect(to, 1); });
    connect(from, 0);
    other.join();
  }

  // Both ends begin a group that sends each of `sources` into `found`.
  void begin(const std::vector<std::byte*>& sources, const std::vector<std::byte*>& found, int64_t nbytes) {
    from.group_start();
    for (std::byte* data : sources) CHECK(from.send(data, nbytes, 1, 0).state == GroupState::Success);
    to.group_start();
    for (std::byte* data : found) CHECK(to.recv(data, nbytes, 0, 0).state == GroupState::Success);
    sent = from.group_end();
    received = to.group_end();
  }
  // Looks until both ends are through; `run`: the GPUs go on meanwhile. Returns how the receiver's group ended.
  GroupOutcome look(int most = 100'000, bool run = false) {
    for (; most > 0; --most) {
      if (sent.state != GroupState::InProgress && received.state != GroupState::InProgress) break;
      if (run) host.cluster.run(rng);
      sent = from.async_error();
      received = to.async_error();
    }
    return received;
  }
  GroupOutcome exchange(const std::vector<std::byte*>& sources, const std::vector<std::byte*>& found,
                        int64_t nbytes, bool run = true) {
    begin(sources, found, nbytes);
    look(100'000, run);
    if (run) CHECK(host.cluster.run(rng));
    return received;
  }

  // Both are through: nothing may be left of them, and one lane alone is never refused a mapping.
  void close() {
    for (FakeIpcDevice* device : {&from, &to}) device->groups->close();
    for (FakeIpcDevice* device : {&from, &to}) device->groups.reset();
    CHECK(mapped() == 0);
    CHECK(host.already == 0);
    for (const auto& rank : host.cluster.ranks) CHECK(rank.events_alive == 0);
    CHECK(host.cluster.mistakes == std::vector<std::string>{});
  }

  int64_t mapped() const {
    int64_t out = 0;
    for (const auto& [where, count] : host.mapped) out += count;
    return out;
  }
};

}  // namespace

TEST_CASE("a group of very many messages is larger than what a socket holds", "[ipc]") {
  Pair pair;
  constexpr size_t kCount = 6000;
  const auto source = pair.from.driver.allocate_exportable(8 * kCount);
  const auto found = pair.to.driver.allocate_exportable(8 * kCount);
  std::vector<std::byte*> sources, targets;
  for (size_t i = 0; i < kCount; ++i) {
    std::memcpy(source.get() + 8 * i, &i, 8);
    sources.push_back(source.get() + 8 * i);
    targets.push_back(found.get() + 8 * i);
  }
  // Nobody takes anything out of the socket before all is in.
  CHECK(pair.exchange(sources, targets, 8).state == GroupState::Success);
  CHECK(std::memcmp(source.get(), found.get(), 8 * kCount) == 0);
  CHECK(pair.host.opened == 1);
  CHECK(pair.host.cluster.mistakes.empty());
}

TEST_CASE("memory is mapped once, and again where its address is another allocation", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(4096), found(4096);
  for (int number = 0; number < 6; ++number) {
    if (number % 2 == 0) pair.host.allocate(source.data(), 4096, true);  // a new id
    source[77] = static_cast<std::byte>(number);
    CHECK(pair.exchange({source.data() + 64}, {found.data()}, 128).state == GroupState::Success);
    CHECK(found[13] == static_cast<std::byte>(number));
    CHECK(pair.host.opened == 1 + number / 2);
  }
  CHECK(pair.host.bounced == 0);
  pair.to.async_error();
  CHECK(pair.mapped() == 1);  // what is gone has been closed
  CHECK(pair.host.cluster.mistakes.empty());
}

TEST_CASE("memory that is forgotten is closed when the GPU has passed it, and before other is mapped",
          "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(256, std::byte{7}), found(256), again(256);
  pair.host.allocate(source.data(), 256, true);
  CHECK(pair.exchange({source.data()}, {found.data()}, 256, false).state == GroupState::Success);
  pair.host.allocate(source.data(), 256, true);  // a new id, and the GPU has not begun
  pair.begin({source.data()}, {again.data()}, 256);
  CHECK(pair.look(100).state == GroupState::InProgress);
  CHECK(pair.mapped() == 1);
  CHECK(pair.host.cluster.run(pair.rng));
  CHECK(found == source);
  CHECK(pair.look().state == GroupState::Success);
  CHECK(pair.host.cluster.run(pair.rng));
  CHECK(pair.mapped() == 1);
  CHECK(pair.host.opened == 2);
  pair.close();
  CHECK(again == source);
  CHECK(pair.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("an address that comes back is mapped by a lane while another had mapped what lay there", "[ipc]") {
  const bool busy = GENERATE(false, true);  // the GPU has yet to read what the other lane has mapped
  CAPTURE(busy);
  Pair one;
  Pair two(one);
  std::vector<std::byte> source(256, std::byte{1}), found(256), again(256);
  one.host.allocate(source.data(), 256, true);
  CHECK(one.exchange({source.data()}, {found.data()}, 256, !busy).state == GroupState::Success);
  one.host.allocate(source.data(), 256, true);  // a new id
  two.begin({source.data()}, {again.data()}, 256);
  if (busy) {
    CHECK(two.look(100).state == GroupState::InProgress);
    CHECK(one.host.cluster.run(one.rng));
    CHECK(found == source);
    std::fill(source.begin(), source.end(), std::byte{2});
  }
  CHECK(two.look().state == GroupState::Success);
  CHECK(one.host.cluster.run(one.rng));
  CHECK(again == source);
  CHECK(one.mapped() == 1);
  CHECK(one.host.already > 0);
  // The first lane maps what lies there now: it is the same allocation, which both may have.
  std::fill(source.begin(), source.end(), std::byte{3});
  CHECK(one.exchange({source.data()}, {found.data()}, 256).state == GroupState::Success);
  CHECK(found == source);
  CHECK(one.mapped() == 2);
  CHECK(one.host.opened == 3);
  for (Pair* lane : {&two, &one}) {
    for (FakeIpcDevice* device : {&lane->from, &lane->to}) device->groups->close();
    for (FakeIpcDevice* device : {&lane->from, &lane->to}) device->groups.reset();
  }
  CHECK(one.mapped() == 0);
  CHECK(one.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("a lane maps again what another has closed for it", "[ipc]") {
  Pair one;
  Pair two(one);
  std::vector<std::byte> source(256), other(256, std::byte{9}), found(256);
  one.host.allocate(source.data(), 256, true);
  one.host.allocate(other.data(), 256, true);
  CHECK(one.exchange({source.data(), other.data()}, {found.data(), found.data() + 128}, 128).state ==
        GroupState::Success);
  one.host.allocate(source.data(), 256, true);
  CHECK(two.exchange({source.data()}, {found.data()}, 256).state == GroupState::Success);
  CHECK(one.exchange({other.data()}, {found.data()}, 256).state == GroupState::Success);
  CHECK(found == other);
  CHECK(one.host.opened == 4);
  CHECK(one.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("memory is forgotten where part of it is another allocation", "[ipc]") {
  const auto begin = GENERATE(0, 100, 300, 400);  // of the new one: that of 300 bytes at 200 is gone
  CAPTURE(begin);
  Pair pair;
  std::vector<std::byte> memory(1024), found(1024);
  std::byte* const base = memory.data();
  const std::vector<std::byte*> into{found.data(), found.data() + 8, found.data() + 16};
  const auto send = [&](std::byte* second) {
    CHECK(pair.exchange({base, second, base + 900}, into, 8).state == GroupState::Success);
    pair.to.async_error();
  };
  // Neighbours on both sides, of which nothing is forgotten: they end where the others begin.
  pair.host.allocate(base, 100, true);
  pair.host.allocate(base + 200, 300, true);
  pair.host.allocate(base + 600, 400, true);
  send(base + 200);
  CHECK(pair.mapped() == 3);
  pair.host.free(base + 200);
  if (begin == 0) pair.host.free(base);
  pair.host.allocate(base + begin, 600 - begin, true);
  std::memset(base + 450, 9, 8);
  send(base + 450);
  CHECK(found[8] == std::byte{9});
  CHECK(pair.mapped() == (begin == 0 ? 2 : 3));
  CHECK(pair.host.opened == 4);
  CHECK(pair.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("what cannot be exported is not overwritten while the GPU has yet to read its copy", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(4096), found(4096);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7);
  // Each time more than before, and two messages: the copies lie beside each other.
  for (int64_t nbytes = 100, at = 0; nbytes <= 800; nbytes *= 2) {
    std::byte* const to = found.data() + at;
    CHECK(pair.exchange({source.data() + at, source.data() + at + nbytes}, {to, to + nbytes}, nbytes, false)
              .state == GroupState::Success);
    at += 2 * nbytes;
  }
  CHECK(pair.host.bounced == 8);
  const bool ends = GENERATE(false, true);
  if (ends) pair.from.groups.reset();  // what the peer's GPU has yet to read stays also then
  CHECK(pair.host.cluster.run(pair.rng));
  CHECK(std::memcmp(source.data(), found.data(), 3000) == 0);
  CHECK(pair.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("memory that CUDA says it exports, and then does not, goes through a copy", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(600), found(600);
  pair.host.allocate(source.data(), 600, true);
  pair.host.allocations.at(source.data()).refused = true;
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < source.size(); ++i)
      source[i] = static_cast<std::byte>(i * 7 + static_cast<size_t>(round));
    CHECK(pair.exchange({source.data(), source.data() + 300}, {found.data(), found.data() + 300}, 300).state ==
          GroupState::Success);
    CHECK(found == source);
  }
  CHECK(pair.host.bounced == 6);
  CHECK(pair.host.opened == 1);
  // What lies there next is another allocation, which can be.
  pair.host.allocate(source.data(), 600, true);
  CHECK(pair.exchange({source.data()}, {found.data()}, 600).state == GroupState::Success);
  CHECK(pair.host.bounced == 6);
  CHECK(pair.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("staging that is retired returns to the GPU when its peers have closed it", "[ipc]") {
  Pair pair;
  StagingPool& pool = pair.from.driver.staging();
  std::byte* const source = pool.take(4096);
  std::vector<std::byte> found(4096);
  source[9] = std::byte{9};
  CHECK(pair.exchange({source}, {found.data()}, 4096).state == GroupState::Success);
  CHECK(found[9] == std::byte{9});
  pool.give(source);
  pool.trim();
  CHECK(pool.figures().returned == 0);
  pair.from.groups->retire(source);
  CHECK(pair.from.groups->rest());  // the peer has not read it
  pair.to.groups->rest();
  CHECK(pair.host.cluster.run(pair.rng));
  pair.to.groups->rest();  // closed, once its GPU was past it
  CHECK_FALSE(pair.from.groups->rest());
  CHECK(pair.mapped() == 0);
  pool.trim();
  CHECK(pool.figures().returned == 1);
  // Another takes its place, at the same address or not.
  std::byte* const again = pool.take(4096);
  again[9] = std::byte{10};
  CHECK(pair.exchange({again}, {found.data()}, 4096).state == GroupState::Success);
  CHECK(found[9] == std::byte{10});
  pair.close();
}

TEST_CASE("staging of a group that has closed returns to the GPU after its peers have closed, too", "[ipc]") {
  const bool first = GENERATE(false, true);  // its owner closes before the peer does
  CAPTURE(first);
  Pair pair;
  StagingPool& pool = pair.from.driver.staging();
  std::byte* const source = pool.take(4096);
  std::vector<std::byte> found(4096);
  CHECK(pair.exchange({source}, {found.data()}, 4096).state == GroupState::Success);
  pool.give(source);
  (first ? pair.from : pair.to).groups->close();
  pool.trim();
  CHECK(pool.figures().returned == 0);
  pair.close();
  pool.trim();
  CHECK(pool.figures().returned == 1);
}

TEST_CASE("buffers of what cannot be exported are given back with staging", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(512, std::byte{5}), found(512);
  CHECK(pair.exchange({source.data()}, {found.data()}, 512).state == GroupState::Success);
  const std::byte* const copy = pair.host.allocations.begin()->first;
  pair.from.groups->retire(nullptr);
  CHECK(*copy == std::byte{0xEE});  // others may have it
  source[3] = std::byte{6};
  CHECK(pair.exchange({source.data()}, {found.data()}, 512).state == GroupState::Success);
  CHECK(found == source);
  pair.close();
}

TEST_CASE("groups that end leave mapped what the GPU has yet to read, and close the rest", "[ipc]") {
  const bool early = GENERATE(false, true);
  CAPTURE(early);
  Pair pair;
  const auto source = pair.from.driver.allocate_exportable(256);
  std::vector<std::byte> found(256);
  std::memset(source.get(), 3, 256);
  CHECK(pair.exchange({source.get()}, {found.data()}, 256, !early).state == GroupState::Success);
  pair.to.groups->abort();
  CHECK(pair.to.async_error().state == GroupState::Failed);
  if (!early) CHECK(pair.host.cluster.run(pair.rng));
  pair.to.groups.reset();
  CHECK(pair.mapped() == (early ? 1 : 0));
  CHECK(pair.host.cluster.run(pair.rng));
  CHECK(found == std::vector<std::byte>(256, std::byte{3}));
  CHECK(pair.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("groups that end close what is forgotten as well", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(256), found(256);
  pair.host.allocate(source.data(), 256, true);
  CHECK(pair.exchange({source.data()}, {found.data()}, 256, false).state == GroupState::Success);
  pair.host.allocate(source.data(), 256, true);
  pair.begin({source.data()}, {found.data()}, 256);
  CHECK(pair.look(10).state == GroupState::InProgress);
  pair.to.groups->abort();
  CHECK(pair.mapped() == 1);
  CHECK(pair.host.cluster.run(pair.rng));
  pair.to.groups.reset();
  CHECK(pair.mapped() == 0);
  CHECK(pair.host.cluster.rank(1).events_alive == 0);
}

TEST_CASE("copies that a peer's GPU has yet to read outlive the groups that made them", "[ipc]") {
  Pair pair;
  bool reads = false;
  FakeCluster::Item held;
  held.kind = FakeCluster::Item::Kind::Wait;
  held.until = [&reads] { return reads; };
  pair.host.cluster.rank(1).streams[FakeCluster::kTransfer].push_back(std::move(held));
  std::vector<std::byte> source(512, std::byte{5}), found(512);
  CHECK(pair.exchange({source.data()}, {found.data()}, 512, false).state == GroupState::Success);
  CHECK_FALSE(pair.host.cluster.run(pair.rng));  // the copy is made, and stands still there
  pair.from.groups.reset();
  reads = true;
  CHECK(pair.host.cluster.run(pair.rng));
  CHECK(found == source);
}

TEST_CASE("groups that close give back what they had copied their messages to", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(512, std::byte{5}), found(512);
  CHECK(pair.exchange({source.data()}, {found.data()}, 512).state == GroupState::Success);
  CHECK(found == source);
  REQUIRE(pair.host.allocations.size() == 1);  // the copy's, since the source cannot be exported
  const std::byte* const copy = pair.host.allocations.begin()->first;
  CHECK(*copy == std::byte{5});
  pair.close();
  CHECK(*copy == std::byte{0xEE});  // others may have it
}

TEST_CASE("a receiver that closes its group at once takes its event with it", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(64, std::byte{5}), found(64);
  pair.host.allocate(source.data(), 64, true);
  pair.begin({source.data()}, {found.data()}, 64);
  // The sender's host is elsewhere until the receiver has all that it needs.
  for (int looks = 0; looks < 100 && pair.received.state == GroupState::InProgress; ++looks)
    pair.received = pair.to.async_error();
  CHECK(pair.received.state == GroupState::Success);
  CHECK(pair.host.cluster.run(pair.rng));
  pair.to.groups->close();
  pair.to.groups.reset();
  CHECK(pair.from.async_error().state == GroupState::Success);
  CHECK(found == source);
  CHECK(pair.host.cluster.mistakes == std::vector<std::string>{});
}

TEST_CASE("groups of different size are found", "[ipc]") {
  const bool more = GENERATE(false, true);  // are sent
  CAPTURE(more);
  Pair pair;
  std::vector<std::byte> source(64), found(64);
  std::vector<std::byte*> sources{source.data(), source.data() + 8}, targets{found.data(), found.data() + 8};
  (more ? targets : sources).pop_back();
  const GroupOutcome outcome = pair.exchange(sources, targets, 8, false);
  CHECK(outcome.state == GroupState::Failed);
  CHECK_FALSE(outcome.remote);
  CHECK(outcome.text.find("the ranks do not run the same rounds") != std::string::npos);
}

TEST_CASE("notes keep their order while the socket is full and being read", "[ipc]") {
  Pair pair;
  constexpr size_t kCount = 4000;
  std::vector<uint64_t> source(kCount), found(kCount);
  pair.host.allocate(reinterpret_cast<std::byte*>(source.data()), 8 * kCount, true);
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < kCount; ++i) source[i] = i + 1'000'000 * static_cast<size_t>(round);
    std::thread reader([&] {
      pair.to.group_start();
      for (uint64_t& value : found) pair.to.recv(reinterpret_cast<std::byte*>(&value), 8, 0, 0);
      pair.received = pair.to.group_end();
      while (pair.received.state == GroupState::InProgress) pair.received = pair.to.async_error();
    });
    pair.from.group_start();
    for (uint64_t& value : source) pair.from.send(reinterpret_cast<std::byte*>(&value), 8, 1, 0);
    pair.sent = pair.from.group_end();
    while (pair.sent.state == GroupState::InProgress) pair.sent = pair.from.async_error();
    reader.join();
    CHECK(pair.sent.state == GroupState::Success);
    CHECK(pair.received.state == GroupState::Success);
    CHECK(pair.host.cluster.run(pair.rng));
    REQUIRE(found == source);
  }
}

TEST_CASE("a peer keeps no more than so many allocations mapped", "[ipc]") {
  Pair pair;
  std::vector<std::vector<std::byte>> sources(3 * IpcExports::kMost, std::vector<std::byte>(256));
  std::vector<std::byte> found(256);
  for (size_t i = 0; i < sources.size(); ++i) {
    pair.host.allocate(sources[i].data(), 256, true);
    sources[i][5] = static_cast<std::byte>(i);
    CHECK(pair.exchange({sources[i].data()}, {found.data()}, 256).state == GroupState::Success);
    CHECK(found[5] == static_cast<std::byte>(i));
  }
  pair.to.async_error();
  CHECK(pair.mapped() <= static_cast<int64_t>(IpcExports::kMost));
  CHECK(pair.host.cluster.mistakes.empty());
  // The one that was not used for longest goes.
  const int64_t opened = pair.host.opened;
  for (size_t i = 0; i < sources.size(); ++i) {
    CHECK(pair.exchange({sources.back().data()}, {found.data()}, 256).state == GroupState::Success);
    CHECK(pair.exchange({sources[i].data()}, {found.data()}, 256).state == GroupState::Success);
    CHECK(found[5] == static_cast<std::byte>(i));
  }
  CHECK(pair.host.opened == opened + static_cast<int64_t>(sources.size()) - 1);
  // Not even where one group needs more than that.
  std::vector<std::byte*> all;
  for (auto& source : sources) all.push_back(source.data());
  std::vector<std::vector<std::byte>> targets(sources.size(), std::vector<std::byte>(256));
  std::vector<std::byte*> into;
  for (auto& target : targets) into.push_back(target.data());
  CHECK(pair.exchange(all, into, 256).state == GroupState::Success);
  CHECK(targets == sources);
  CHECK(pair.host.cluster.mistakes.empty());
}

TEST_CASE("a peer that closes its group is told from one that is lost", "[ipc]") {
  Pair pair;
  std::vector<std::byte> source(64), found(64);
  CHECK(pair.exchange({source.data()}, {found.data()}, 64).state == GroupState::Success);
  SECTION("closed, and not needed") {
    pair.from.groups->close();
    CHECK(pair.to.async_error().state == GroupState::Success);
  }
  SECTION("closed, and needed") {
    pair.from.groups->close();
    pair.to.group_start();
    CHECK(pair.to.recv(found.data(), 64, 0, 0).state == GroupState::Success);
    const GroupOutcome outcome = pair.to.group_end();
    CHECK(outcome.state == GroupState::Failed);
    CHECK(outcome.remote);
    CHECK(outcome.peer == 0);
    CHECK(outcome.text == "has closed its group");
  }
  SECTION("lost") {
    pair.from.groups->abort();
    const GroupOutcome outcome = pair.to.async_error();
    CHECK(outcome.state == GroupState::Failed);
    CHECK(outcome.peer == 0);
    // And stays so.
    CHECK(pair.to.async_error().state == GroupState::Failed);
  }
}

TEST_CASE("what a peer names is checked before it is used", "[ipc]") {
  FakeHost host(1);
  FakeIpcDevice device(host, 0);
  FakeIpcDriver& driver = device.driver;
  IpcImports imports(driver, device);
  const auto memory = driver.allocate_exportable(100);
  imports.add(3, *driver.export_memory(*driver.exportable(memory.get())), 100);
  CHECK(imports.at(3, 60, 40) == memory.get() + 60);
  for (const auto& [offset, nbytes] : std::vector<std::pair<int64_t, int64_t>>{
           {61, 40}, {-1, 4}, {4, -1}, {INT64_MAX, 8}, {8, INT64_MAX}, {0, 101}}) {
    CAPTURE(offset, nbytes);
    CHECK_THROWS_AS(imports.at(3, offset, nbytes), Error);
  }
  CHECK_THROWS_AS(imports.at(4, 0, 1), Error);
  imports.close_all();
  CHECK(host.mapped.begin()->second == 0);
}
