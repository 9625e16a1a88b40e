// How the ranks of a host meet for CUDA IPC, and what a link tells of the other end.
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/socket.h>

#include "catch.h"
#include "ipc/fake_ipc.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

using std::chrono::milliseconds;

IpcCard no_card(int32_t) { return {}; }

template <class Call>
std::string refused(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == kind);
    return error.what();
  }
  FAIL("was not refused");
  return {};
}

}  // namespace

TEST_CASE("a peer's last words are heard, also where it has not read everything", "[ipc]") {
  IpcMeeting meetings[2];
  const std::vector<std::string> addresses{meetings[0].address(), meetings[1].address()};
  std::vector<IpcPeer> other;
  std::thread thread([&] { other = meetings[1].meet(addresses, 1, no_card, Clock::now() + kLong, [] {}); });
  std::vector<IpcPeer> mine = meetings[0].meet(addresses, 0, no_card, Clock::now() + kLong, [] {});
  thread.join();
  IpcNote note;
  note.kind = IpcNote::Kind::Forget;
  CHECK(mine.front().link.send(note));  // is never read
  CHECK(other.front().link.send({}));
  other.clear();
  note.memory = 7;
  CHECK(mine.front().link.receive(&note) == IpcLink::Got::Note);
  CHECK(note.kind == IpcNote::Kind::Bye);
  CHECK(note.memory == 0);
  CHECK(mine.front().link.receive(&note) == IpcLink::Got::End);
}

TEST_CASE("ranks that do not come are waited for until the deadline, or the group's end", "[ipc]") {
  IpcMeeting mine;
  IpcMeeting other;  // which never answers
  const std::vector<std::string> addresses{other.address(), mine.address()};
  const TimePoint begin = Clock::now();
  const std::string text = refused(ErrorKind::DeadlineExceeded, [&] {
    mine.meet(addresses, 1, no_card, Clock::now() + milliseconds(60), [] {});
  });
  CHECK(Clock::now() - begin >= milliseconds(60));
  CHECK(text.find("did not connect over CUDA IPC in time") != std::string::npos);
  IpcMeeting again;
  CHECK(refused(ErrorKind::Aborted, [&] {
          again.meet({other.address(), again.address()}, 1, no_card, Clock::now() + kLong,
                     [] { throw Error(ErrorKind::Aborted, "the first cause"); });
        }) == "the first cause");
}

TEST_CASE("a rank that has gone is noticed while the others meet", "[ipc]") {
  IpcMeeting mine;
  std::string address;
  {
    const IpcMeeting gone;
    address = gone.address();
  }
  CHECK(refused(ErrorKind::Generic, [&] {
          mine.meet({address, mine.address()}, 1, no_card, Clock::now() + kLong, [] {});
        }).find("rank 0 of the group on this host") != std::string::npos);
  // One that connects and goes before it has said who it is.
  IpcMeeting first;
  std::thread other([&] { connect_to(first.address(), "rank 0"); });
  refused(ErrorKind::PeerLost, [&] {
    first.meet({first.address(), "nobody"}, 0, no_card, Clock::now() + std::chrono::seconds(20), [] {});
  });
  other.join();
}

TEST_CASE("a meeting that fails leaves no event behind", "[ipc]") {
  FakeHost host(2);
  FakeIpcDevice device(host, 1);
  IpcMeeting mine;
  const IpcMeeting other;  // which never answers
  refused(ErrorKind::DeadlineExceeded, [&] {
    IpcExchange::connect(device.driver, device, mine, {other.address(), mine.address()}, 1,
                         Clock::now() + milliseconds(20), [] {});
  });
  CHECK(host.cluster.rank(1).events_alive == 0);
}

TEST_CASE("who calls and is not of the group is refused", "[ipc]") {
  IpcMeeting first;
  const auto refuses = [&](int32_t count, const std::string& expected) {
    std::vector<std::string> addresses(static_cast<size_t>(count), "nobody");
    addresses[0] = first.address();
    CHECK(refused(ErrorKind::Generic, [&] {
            first.meet(addresses, 0, no_card, Clock::now() + kLong, [] {});
          }).find(expected) != std::string::npos);
  };
  // As rank `rank` of a larger group, all of whose lower ranks are at one address. It is never answered.
  const auto call_as = [&](int32_t rank) {
    IpcMeeting stray;
    std::vector<std::string> addresses(static_cast<size_t>(rank), first.address());
    addresses.push_back(stray.address());
    CHECK_THROWS_AS(stray.meet(addresses, rank, no_card, Clock::now() + milliseconds(1), [] {}), Error);
  };
  SECTION("a rank beyond the last") {
    call_as(2);
    refuses(2, "a stray process called");
  }
  SECTION("a rank that is connected already") {
    std::vector<std::thread> strays;
    std::vector<IpcPeer> served;  // the first of them keeps its connection
    std::mutex mutex;
    for (int number = 0; number < 2; ++number) {
      strays.emplace_back([&] {
        IpcMeeting stray;
        try {
          auto peers = stray.meet({first.address(), stray.address()}, 1, no_card, Clock::now() + kLong, [] {});
          const std::lock_guard lock(mutex);
          for (IpcPeer& peer : peers) served.push_back(std::move(peer));
        } catch (const Error&) {
          // The other is sent away.
        }
      });
    }
    refuses(3, "a stray process called");
    for (std::thread& stray : strays) stray.join();
  }
  SECTION("another program") {
    const Descriptor stray = connect_to(first.address(), "rank 0");
    const std::vector<std::byte> hello(16 + kSocketNameBytes + sizeof(IpcCard));  // of the right size
    CHECK(::send(stray.get(), hello.data(), hello.size(), 0) == static_cast<ssize_t>(hello.size()));
    refuses(2, "does not speak this protocol");
  }
}
