#include "transport/local_meeting.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include <sys/socket.h>
#include <sys/wait.h>

#include "catch.h"
#include "common/error.h"

using namespace meshcast;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr LocalMeeting::Protocol kProtocol{0x74657374, 4, 0, "a test"};
constexpr auto kMeetingLimit = seconds(30);
constexpr const char* kNotRefused = "was not refused as expected";

LocalMeeting::Greeting greet(int32_t peer) {
  LocalMeeting::Greeting out{std::vector<std::byte>(4), {}};
  std::memcpy(out.bytes.data(), &peer, sizeof peer);
  return out;
}

std::string name_of(const LocalMeeting& meeting) {
  return meeting.address().substr(0, meeting.address().find('/'));
}

struct Ranks {
  explicit Ranks(int32_t count) : meetings(static_cast<size_t>(count)) {
    for (const auto& meeting : meetings)
      addresses.emplace(static_cast<int32_t>(addresses.size()), meeting.address());
  }

  std::vector<LocalMeeting::Peer> meet(int32_t rank, Clock::duration limit = kMeetingLimit,
                                       const LocalMeeting::Protocol& protocol = kProtocol) {
    return meetings[static_cast<size_t>(rank)].meet(addresses, rank, protocol, greet, Clock::now() + limit);
  }

  void all_meet() {
    std::vector<std::future<std::vector<LocalMeeting::Peer>>> found;
    for (const auto& [rank, address] : addresses)
      found.push_back(std::async(std::launch::async, [this, rank = rank] { return meet(rank); }));
    for (int32_t rank = 0; rank < static_cast<int32_t>(found.size()); ++rank) {
      const auto peers = found[static_cast<size_t>(rank)].get();
      REQUIRE(peers.size() == addresses.size() - 1);
      for (size_t i = 0; i < peers.size(); ++i) {
        const int32_t other = static_cast<int32_t>(i) + (static_cast<int32_t>(i) >= rank ? 1 : 0);
        CHECK(peers[i].rank == other);
        CHECK(peers[i].bytes == greet(rank).bytes);
      }
    }
  }

  std::vector<LocalMeeting> meetings;
  std::map<int32_t, std::string> addresses;
};

// Any thread: without assertions, of which Catch2 takes one at a time. kNotRefused where the
// call was not refused, or by another kind of error.
template <class Call>
std::string refused(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind() == kind ? error.what() : std::string(kNotRefused) + ", but: " + error.what();
  }
  return kNotRefused;
}

void shout(int socket, size_t nbytes, std::byte with) {
  const std::vector<std::byte> noise(nbytes, with);
  ::send(socket, noise.data(), noise.size(), MSG_NOSIGNAL);
}

}  // namespace

TEST_CASE("ranks of a host meet, whoever else calls", "[exec][shm]") {
  Ranks ranks(4);
  std::vector<Descriptor> strangers;
  const auto call = [&] { return connect_to(name_of(ranks.meetings[0])); };
  SECTION("nobody") {}
  SECTION("who goes at once") { call(); }
  SECTION("who says nothing") { strangers.push_back(call()); }
  SECTION("who talks of something else") {
    for (const size_t nbytes : {1, 7, 48, 52, 64 * 1024}) {
      for (const int with : {0, 0x5a, 0xff}) {
        strangers.push_back(call());
        shout(strangers.back().get(), nbytes, static_cast<std::byte>(with));
      }
    }
  }
  SECTION("more silent ones than can wait at the door") {
    for (;;) {
      strangers.push_back(call());
      if (strangers.back().get() < 0) break;
    }
    CHECK(strangers.size() > 100);
    std::atomic<bool> over = false;
    std::thread crowd([&] {
      while (!over) {
        strangers.push_back(call());
        if (strangers.back().get() < 0) std::this_thread::sleep_for(milliseconds(1));
        if (strangers.size() > 500) strangers.erase(strangers.begin(), strangers.begin() + 100);
      }
    });
    try {
      ranks.all_meet();
    } catch (...) {
      over = true;
      crowd.join();
      throw;
    }
    over = true;
    crowd.join();
    return;
  }
  ranks.all_meet();
}

TEST_CASE("a secret that is not the rank's opens no door", "[exec][shm]") {
  Ranks ranks(2);
  std::map<int32_t, std::string> wrong = ranks.addresses;
  char& last = wrong[0].back();
  last = last == '0' ? '1' : '0';
  LocalMeeting stranger;  // it passes itself off as rank 1
  wrong[1] = stranger.address();
  auto other = std::async(std::launch::async, [&] {
    return refused(ErrorKind::DeadlineExceeded,
                   [&] { stranger.meet(wrong, 1, kProtocol, greet, Clock::now() + milliseconds(300)); });
  });
  const std::string text = refused(ErrorKind::DeadlineExceeded, [&] { ranks.meet(0, milliseconds(300)); });
  CHECK(text.find("rank 1 of the group has exited or is blocked") != std::string::npos);
  CHECK(other.get().find(kNotRefused) == std::string::npos);
}

TEST_CASE("a rank of another version is told apart from a stranger", "[exec][shm]") {
  Ranks ranks(2);
  LocalMeeting::Protocol other = kProtocol;
  other.magic += 1;
  auto second = std::async(std::launch::async, [&] {
    try {
      ranks.meet(1, milliseconds(500), other);
    } catch (const Error&) {
      return true;
    }
    return false;
  });
  CHECK(refused(ErrorKind::Generic, [&] { ranks.meet(0); }).find("install one version") != std::string::npos);
  CHECK(second.get());
}

TEST_CASE("a rank that dies while the ranks of its host meet is named at once", "[exec][shm]") {
  // Each of the others waits for it: rank 0 to be called, rank 2 to be answered.
  Ranks ranks(3);
  int gate[2];
  REQUIRE(pipe(gate) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    LocalMeeting mine;  // what the process listens at shows the process
    const std::string address = mine.address();
    if (write(gate[1], address.data(), address.size()) < 0) _exit(3);
    for (;;) pause();
  }
  std::string address(ranks.addresses[1].size(), ' ');
  REQUIRE(read(gate[0], address.data(), address.size()) == static_cast<ssize_t>(address.size()));
  close(gate[0]);
  close(gate[1]);
  ranks.addresses[1] = address;
  std::vector<std::future<std::string>> found;
  const auto begin = Clock::now();
  for (const int32_t rank : {0, 2}) {
    found.push_back(std::async(std::launch::async, [&ranks, rank] {
      return refused(ErrorKind::PeerLost, [&] { ranks.meet(rank); });
    }));
  }
  std::this_thread::sleep_for(milliseconds(200));
  kill(child, SIGKILL);
  for (auto& each : found)
    CHECK(each.get().find("rank 1 of the group on this host exited") != std::string::npos);
  CHECK(Clock::now() - begin < kMeetingLimit / 2);
  waitpid(child, nullptr, 0);
}

TEST_CASE("a rank that gives up while the ranks of its host meet is named at once", "[exec][shm]") {
  // Its process lives on. The others have found it alive before it gives up.
  Ranks ranks(3);
  auto second = std::make_unique<LocalMeeting>();
  ranks.addresses[1] = second->address();
  std::vector<std::future<std::string>> found;
  const auto begin = Clock::now();
  for (const int32_t rank : {0, 2}) {
    found.push_back(std::async(std::launch::async, [&ranks, rank] {
      return refused(ErrorKind::PeerLost, [&] { ranks.meet(rank); });
    }));
  }
  std::this_thread::sleep_for(milliseconds(300));
  second.reset();
  for (auto& each : found)
    CHECK(each.get().find("rank 1 of the group on this host exited, or gave up") != std::string::npos);
  CHECK(Clock::now() - begin < kMeetingLimit / 2);
}
