// Staging that all lanes of a process share: its limit, and when it returns to the GPU.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "ipc/fake_ipc.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Pooled {
  FakeHost host{1};
  StagingPool pool{host.pooled()};
  int64_t on_gpu() const { return pool.figures().in_use + pool.figures().spare; }
};

}  // namespace

TEST_CASE("memory that is not of the pool cannot be shown", "[ipc]") {
  std::byte other{};
  StagingPool pool({[&](int64_t) { return &other; }, [](std::byte*) {}});
  CHECK_FALSE(pool.show(&other));  // torch's, at an address that the pool gets later
  std::byte* const block = pool.take(1);
  CHECK(block == &other);
  CHECK(pool.show(block));
  pool.give(block);
  pool.trim();
  CHECK(pool.figures().returned == 0);
  pool.hide(block);
  pool.trim();
  CHECK(pool.figures().returned == 1);
}

TEST_CASE("a block that was given back serves the next request of a similar size", "[ipc]") {
  Pooled of;
  std::byte* const first = of.pool.take(100);
  CHECK(of.pool.figures().in_use == 2 * kMiB);
  of.pool.give(first);
  CHECK(of.pool.take(2 * kMiB) == first);
  of.pool.give(first);
  // Not one of several times its size, while there is room: the next large request would find none.
  std::byte* const large = of.pool.take(40 * kMiB);
  CHECK(of.pool.figures().in_use == 40 * kMiB);
  of.pool.give(large);
  std::byte* const other = of.pool.take(5 * kMiB);
  CHECK(other != large);
  CHECK(of.pool.take(39 * kMiB) == large);
  const StagingPool::Figures found = of.pool.figures();
  CHECK(found.allocations == 3);
  CHECK(found.peak == 46 * kMiB);
  CHECK(found.spare == 2 * kMiB);
}

TEST_CASE("blocks are no more than an eighth larger than asked for", "[ipc]") {
  Pooled of;
  for (const int64_t mib : {17, 33, 65, 129, 257, 300}) {
    std::byte* const data = of.pool.take(mib * kMiB);
    const int64_t got = of.pool.figures().in_use;
    CHECK(got >= mib * kMiB);
    CHECK(got <= (mib * kMiB) * 9 / 8 + 2 * kMiB);
    of.pool.give(data);
    of.pool.trim();
  }
}

TEST_CASE("staging stays within its limit, by what is spare and mapped nowhere", "[ipc]") {
  Pooled of;
  of.pool.limit_to(32 * kMiB);
  std::byte* const one = of.pool.take(8 * kMiB);
  std::byte* const two = of.pool.take(16 * kMiB);
  of.pool.show(two);
  of.pool.give(one);
  of.pool.give(two);
  std::byte* const three = of.pool.take(2 * kMiB);
  CHECK(of.on_gpu() == 26 * kMiB);
  CHECK(of.pool.take(10 * kMiB) == two);
  try {
    of.pool.take(24 * kMiB);
    FAIL("was not refused");
  } catch (const Error& error) {
    const std::string text = error.what();
    CAPTURE(text);
    CHECK(text.find("24.0 MiB of staging are needed with 18.0 MiB") != std::string::npos);
    CHECK(text.find("32.0 MiB are allowed: raise MESHCAST_CUDA_STAGING_MB") != std::string::npos);
  }
  CHECK(of.host.pool_memory.size() == 2);  // the spare one made room, if not enough
  of.pool.give(three);
  CHECK(of.pool.take(16 * kMiB) != nullptr);  // in the place of that one
  CHECK(of.host.pool_memory.size() == 2);
  CHECK(of.on_gpu() == 32 * kMiB);
  // What a peer has mapped does not go: it serves, too large as it is.
  of.pool.give(two);
  CHECK(of.pool.take(2 * kMiB) == two);
  CHECK(of.pool.figures().returned == 2);
  CHECK(of.host.cluster.mistakes.empty());
}

TEST_CASE("nothing returns to the GPU while some is in use, or mapped", "[ipc]") {
  Pooled of;
  std::byte* const one = of.pool.take(kMiB);
  std::byte* const two = of.pool.take(kMiB);
  of.pool.show(one);
  of.pool.show(one);
  of.pool.give(one);
  of.pool.trim();
  CHECK(of.on_gpu() == 4 * kMiB);
  of.pool.give(two);
  of.pool.hide(one);
  of.pool.trim();
  CHECK(of.on_gpu() == 2 * kMiB);
  of.pool.hide(one);
  of.pool.hide(one - 1);  // is no block
  of.pool.trim();
  CHECK(of.on_gpu() == 0);
  CHECK(of.pool.figures().returned == 2);
}

TEST_CASE("a peer that is left has blocks mapped until it closes, or ends", "[ipc]") {
  const bool dies = GENERATE(false, true);
  CAPTURE(dies);
  IpcMeeting meetings[2];
  const std::vector<std::string> addresses{meetings[0].address(), meetings[1].address()};
  std::vector<IpcPeer> other;
  const auto no_card = [](int32_t) { return IpcCard{}; };
  std::thread thread([&] { other = meetings[1].meet(addresses, 1, no_card, Clock::now() + kLong, [] {}); });
  std::vector<IpcPeer> mine = meetings[0].meet(addresses, 0, no_card, Clock::now() + kLong, [] {});
  thread.join();
  Pooled of;
  std::byte* const data = of.pool.take(kMiB);
  of.pool.show(data);
  of.pool.give(data);
  mine.front().link.stop_sending();
  of.pool.part(std::move(mine.front().link), {data});
  of.pool.trim();
  CHECK(of.on_gpu() == 2 * kMiB);
  IpcNote note;
  CHECK(other.front().link.receive(&note) == IpcLink::Got::End);
  if (!dies) {
    note.kind = IpcNote::Kind::Copied;
    CHECK(other.front().link.send(note));
    of.pool.trim();
    CHECK(of.on_gpu() == 2 * kMiB);
    CHECK(other.front().link.send({}));
  } else {
    other.clear();
  }
  of.pool.trim();
  CHECK(of.on_gpu() == 0);
}
