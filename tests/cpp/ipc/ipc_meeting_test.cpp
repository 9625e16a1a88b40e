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
  CHECK(text.find("did not connect for CUDA IPC in time") != std::string::npos);
  IpcMeeting again;
  CHECK(refused(ErrorKind::Aborted, [&] {
          again.meet({other.address(), again.address()}, 1, no_card, Clock::now() + kLong,
                     [] { throw Error(ErrorKind::Aborted, "the first cause"); });
        }) == "the first cause");
}

TEST_CASE("a rank that has exited is noticed while the others meet", "[ipc]") {
  IpcMeeting mine;
  std::string address;
  {
    const IpcMeeting gone;
    address = gone.address();
  }
  CHECK(refused(ErrorKind::PeerLost, [&] {
          mine.meet({address, mine.address()}, 1, no_card, Clock::now() + kLong, [] {});
        }).find("rank 0 of the group on this host") != std::string::npos);
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
