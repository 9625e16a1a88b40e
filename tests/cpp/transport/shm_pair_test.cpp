// Messages between two ranks of a host: probes, sizes, what ends when, and peers that leave or write nonsense.
#include "transport/shm_pair.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "catch.h"
#include "common/error.h"
#include "support/soon.h"
#include "support/tally.h"
#include "transport/shm_pair_receiver.h"
#include "transport/shm_pair_sender.h"

using namespace meshcast;
using namespace meshcast::testing;
using std::chrono::milliseconds;

namespace {

constexpr auto kEnd = milliseconds(20000);  // of a test that hangs
constexpr auto kNotYet = milliseconds(20);
constexpr size_t kSmall = 100;
constexpr size_t kLargestAtOnce = 8 * 1024;  // of those that end at once
constexpr size_t kMany = 128;                // of those that may wait at the peer
constexpr size_t kLarge = 3 << 20;           // more than the memory between the two holds

using Data = std::vector<uint8_t>;
using Pair = std::array<std::shared_ptr<ProbingTransport>, 2>;

Pair connect_pair() {
  std::vector<std::unique_ptr<ShmPairRendezvous>> sides;
  for (int i = 0; i < 2; ++i)
    sides.push_back(
        std::make_unique<ShmPairRendezvous>(std::make_shared<ShmProgress>(std::make_shared<Progress>())));
  const auto limit = Clock::now() + std::chrono::seconds(20);
  auto other = std::async(std::launch::async, [&] { return sides[1]->meet(7, 3, sides[0]->address(), limit); });
  Pair out;
  out[0] = sides[0]->meet(3, 7, sides[1]->address(), limit);
  out[1] = other.get();
  return out;
}

Data content(size_t nbytes, uint64_t seed) {
  Data out(nbytes);
  for (size_t i = 0; i < nbytes; ++i) out[i] = static_cast<uint8_t>(i * 7 + i / 251 + 13 * seed);
  return out;
}

void send(Pair& pair, int from, uint64_t key, const Data& data, Tally& tally) {
  pair[static_cast<size_t>(from)]->send({1 - from, 0, key}, static_cast<int64_t>(data.size()),
                                        tally.out(data.data()));
}

void recv(Pair& pair, int at, uint64_t key, Data& data, Tally& tally) {
  pair[static_cast<size_t>(at)]->recv({1 - at, 0, key}, static_cast<int64_t>(data.size()),
                                      tally.in(data.data()));
}

void probe(Pair& pair, int at, uint64_t key, Tally& tally) {
  pair[static_cast<size_t>(at)]->probe({1 - at, 0, key}, tally.told());
}

int count_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

void check_through(Tally& tally) {
  REQUIRE(tally.all_ended(kEnd));
  CHECK(tally.why() == "");
}

}  // namespace

TEST_CASE("shared pair: a probe is told once its message is here, which stays", "[shm]") {
  auto pair = connect_pair();
  uint64_t key = 0;
  for (const size_t nbytes : {size_t{0}, size_t{10}, kLargestAtOnce, kLargestAtOnce + 1, kLarge}) {
    for (const bool early : {false, true}) {  // whether the probe comes before the message
      Tally sent;
      Tally here;
      Tally received;
      const Data data = content(nbytes, key);
      Data got(nbytes);
      if (early) {
        probe(pair, 1, key, here);
        CHECK_FALSE(here.all_ended(kNotYet));
      }
      send(pair, 0, key, data, sent);
      if (!early) {
        std::this_thread::sleep_for(milliseconds(2));
        probe(pair, 1, key, here);
      }
      check_through(here);
      CHECK(sent.all_ended(kNotYet) == (nbytes <= kLargestAtOnce));
      recv(pair, 1, key, got, received);
      check_through(received);
      check_through(sent);
      CHECK((got == data));
      ++key;
    }
  }
}

TEST_CASE("shared pair: a message of another size than its receive fails, at its sender too where it is large",
          "[shm]") {
  auto pair = connect_pair();
  uint64_t key = 0;
  for (const bool early : {false, true}) {  // whether the receive comes before the message
    for (const auto& [sent, expected] :
         std::vector<std::pair<size_t, size_t>>{{10, 11},
                                                {10, 9},
                                                {0, 1},
                                                {1, 0},
                                                {kLarge, kLarge + 1},
                                                {kLarge, kLarge - 1},
                                                {kLarge, 10},
                                                {10, kLarge},
                                                {kLargestAtOnce + 1, kLargestAtOnce},
                                                {kLargestAtOnce, kLargestAtOnce + 1}}) {
      INFO(sent << " bytes met " << expected << ", early: " << early);
      const std::string why =
          "a message of " + std::to_string(sent) + " bytes met a receive of " + std::to_string(expected);
      Tally out;
      Tally in;
      Tally next;
      const Data data = content(sent, key);
      Data got(expected, 9);
      const Data given = content(kSmall, key + 1);
      Data following(kSmall);
      if (early) recv(pair, 1, key, got, in);
      send(pair, 0, key, data, out);
      if (!early) {
        std::this_thread::sleep_for(milliseconds(1));
        recv(pair, 1, key, got, in);
      }
      REQUIRE(in.all_ended(kEnd));
      CHECK(in.why() == why);
      REQUIRE(out.all_ended(kEnd));
      CHECK(out.why() == (sent > kLargestAtOnce ? why : ""));
      CHECK((got == Data(expected, 9)));
      send(pair, 0, key + 1, given, next);
      recv(pair, 1, key + 1, following, next);
      check_through(next);
      CHECK((following == given));
      key += 2;
    }
  }
}

TEST_CASE("shared pair: small messages end before they are received, as long as few wait", "[shm]") {
  auto pair = connect_pair();
  for (int round = 0; round < 3; ++round) {
    const auto first = static_cast<uint64_t>(1000 * round);
    Tally at_once;
    Tally waits;
    Tally received;
    std::vector<Data> data;
    std::vector<Data> got(kMany + 10, Data(kLargestAtOnce));
    for (size_t i = 0; i < got.size(); ++i) data.push_back(content(kLargestAtOnce, first + i));
    for (size_t i = 0; i < got.size(); ++i) send(pair, 0, first + i, data[i], i < kMany ? at_once : waits);
    check_through(at_once);
    CHECK_FALSE(waits.all_ended(kNotYet));
    CHECK(waits.failed() == 0);
    for (size_t i = got.size(); i-- > 0;) recv(pair, 1, first + i, got[i], received);
    check_through(received);
    check_through(waits);
    CHECK((got == data));
  }
}

TEST_CASE("shared pair: a message that waits for its receive does not hold up others", "[shm]") {
  auto pair = connect_pair();
  Tally waits;
  const Data large = content(kLarge, 1);
  for (uint64_t key = 0; key < 20; ++key) send(pair, 0, key, large, waits);
  for (uint64_t key = 100; key < 110; ++key) {
    Tally passes;
    const Data data = content(kLarge, key);
    Data got(kLarge);
    send(pair, 0, key, data, passes);
    recv(pair, 1, key, got, passes);
    check_through(passes);
    CHECK((got == data));
  }
  CHECK_FALSE(waits.all_ended(kNotYet));
  CHECK(waits.failed() == 0);
  pair[1]->abort();
  REQUIRE(waits.all_ended(kEnd));
  CHECK(waits.failed() == 20);
}

namespace {

// A sender and a receiver that take turns only when they are told to, so that all that happens is in order.
// Declared behind the tallies of its messages, which it tells when it goes.
struct Halves {
  std::array<std::shared_ptr<ShmProgress>, 2> progress;
  std::array<std::unique_ptr<ShmProgress::Place>, 2> places;
  std::unique_ptr<ShmPipe> pipe = ShmPipe::create();
  std::unique_ptr<ShmPipe> there = ShmPipe::open(pipe->fd());
  std::unique_ptr<ShmPeer> receiving;
  std::unique_ptr<ShmPeer> sending;
  std::unique_ptr<ShmPairSender> sender;
  std::unique_ptr<ShmPairReceiver> receiver;

  Halves() {
    for (size_t i = 0; i < 2; ++i) {
      progress[i] = std::make_shared<ShmProgress>(std::make_shared<Progress>());
      places[i] = std::make_unique<ShmProgress::Place>(progress[i]);
    }
    const auto peer = [&](size_t i) {
      const auto doorbell = progress[i]->doorbell_of_peer(progress[i]->doorbell().fds());
      return std::make_unique<ShmPeer>(static_cast<int>(i), -1, doorbell, places[i]->number());
    };
    sending = peer(0);
    receiving = peer(1);
    sender = std::make_unique<ShmPairSender>(*places[0], *pipe, *receiving);
    receiver = std::make_unique<ShmPairReceiver>(*places[1], *there, *sending);
  }
  ~Halves() {
    sender->finish();
    receiver->finish();
  }

  void send(uint64_t key, const Data& data, Tally& tally) const {
    sender->send(key, static_cast<int64_t>(data.size()), tally.out(data.data()));
  }
  void recv(uint64_t key, Data& data, Tally& tally) const {
    receiver->recv(key, static_cast<int64_t>(data.size()), tally.in(data.data()));
  }
  void send_turn() const {
    sender->turn([] { return false; });
  }
  // Takes turns for as long as the receiver says that another is due.
  void recv_turns() const {
    while (receiver->turn()) {
    }
  }
};

bool ended(Tally& tally) { return tally.all_ended(milliseconds(0)); }

}  // namespace

// The peer takes nothing at all, as one that is stopped.
TEST_CASE("shared pair: a message ends once its receiver has it, not once it is written", "[shm]") {
  Tally in;
  Tally out;
  const Data data = content(kLargestAtOnce + 1, 3);
  Data got(data.size());
  const Halves halves;
  halves.recv(5, got, in);
  halves.send(5, data, out);
  halves.send_turn();
  CHECK_FALSE(ended(out));
  SECTION("it takes it") {
    halves.receiver->turn();
    CHECK(ended(in));
    CHECK_FALSE(ended(out));
    halves.send_turn();
    CHECK(ended(out));
    CHECK(out.failed() == 0);
    CHECK((got == data));
  }
  SECTION("it has gone") {
    halves.sender->mark_gone();
    halves.send_turn();
    CHECK(ended(out));
    CHECK(out.why() == kShmGone);
  }
  SECTION("it had taken it before it went") {
    halves.receiver->turn();
    halves.sender->mark_gone();
    halves.send_turn();
    CHECK(ended(out));
    CHECK(out.failed() == 0);
  }
}

// More than a turn reads.
TEST_CASE("shared pair: what a peer wrote before it went comes, however much it is", "[shm]") {
  constexpr uint64_t kCount = 100;
  std::vector<Data> data;
  std::vector<Data> got(kCount, Data(kLargestAtOnce));
  Data never(kLargestAtOnce);
  Tally out;
  Tally in;
  Tally late;
  const Halves halves;
  for (uint64_t key = 0; key < kCount; ++key) data.push_back(content(kLargestAtOnce, key));
  for (uint64_t key = 0; key < kCount; ++key) halves.send(key, data[key], out);
  CHECK(ended(out));
  halves.receiver->mark_gone();
  SECTION("received before") {
    for (uint64_t key = kCount; key-- > 0;) halves.recv(key, got[key], in);
    halves.recv_turns();
  }
  SECTION("received later") {
    halves.recv_turns();
    for (uint64_t key = 0; key < kCount; ++key) halves.recv(key, got[key], in);
  }
  CHECK(ended(in));
  CHECK(in.why() == "");
  CHECK((got == data));
  halves.recv(kCount, never, late);
  halves.recv_turns();
  CHECK(ended(late));
  CHECK(late.why() == kShmGone);
}

TEST_CASE("shared pair: answers that found the queue full are said once there is room", "[shm]") {
  constexpr uint64_t kCount = ShmPipe::kMaxAnswers + 50;
  const Data data = content(100 * 1024, 1);  // of more than one record
  std::vector<Data> got(kCount, Data(data.size()));
  Tally in;
  Tally out;
  const Halves halves;
  for (uint64_t key = 0; key < kCount; ++key) halves.recv(key, got[key], in);
  halves.send_turn();  // reads what the queue holds
  halves.receiver->turn();
  halves.send_turn();
  halves.send(kCount - 1, data, out);
  for (int turn = 0; turn < 4; ++turn) {
    halves.send_turn();
    halves.receiver->turn();
  }
  halves.send_turn();
  CHECK(ended(out));
  CHECK(out.why() == "");
  CHECK((got.back() == data));
  CHECK(in.failed() == 0);
}

TEST_CASE("shared pair: drawn messages both ways, in any order of calls", "[shm]") {
  const uint32_t seed = std::random_device()();
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  auto pair = connect_pair();
  constexpr std::array<size_t, 8> kSizes{0, 1, 33, 4000, kLargestAtOnce, kLargestAtOnce + 1, 70'000, 1'500'000};
  for (int round = 0; round < 20; ++round) {
    struct Drawn {
      int from;
      uint64_t key;
      Data data;
      Data got;
    };
    std::vector<Drawn> drawn;
    std::vector<std::pair<size_t, bool>> calls;  // which, and whether it is the send
    for (size_t i = 0; i < 30 + rng() % 100; ++i) {
      const size_t nbytes = kSizes[rng() % kSizes.size()];
      drawn.push_back({static_cast<int>(rng() % 2), i + 1000 * static_cast<uint64_t>(round),
                       content(nbytes, rng() % 1000), Data(nbytes)});
      for (const bool sends : {false, true}) calls.emplace_back(i, sends);
    }
    std::shuffle(calls.begin(), calls.end(), rng);
    Tally tally;
    // The calls of each rank by a thread of its own, as in a program.
    std::vector<std::thread> ranks;
    for (const int rank : {0, 1}) {
      ranks.emplace_back([&, rank] {
        for (const auto& [i, sends] : calls) {
          Drawn& each = drawn[i];
          if ((sends ? each.from : 1 - each.from) != rank) continue;
          if (sends) {
            send(pair, rank, each.key, each.data, tally);
          } else {
            recv(pair, rank, each.key, each.got, tally);
          }
        }
      });
    }
    for (auto& rank : ranks) rank.join();
    check_through(tally);
    for (const Drawn& each : drawn) REQUIRE((each.got == each.data));
  }
}

TEST_CASE("shared pair: more receives than the queue of answers holds, before their messages", "[shm]") {
  auto pair = connect_pair();
  constexpr uint64_t kCount = 500;
  Tally tally;
  const Data data = content(kLargestAtOnce + 1, 1);
  std::vector<Data> got(kCount, Data(data.size()));
  for (uint64_t key = 0; key < kCount; ++key) recv(pair, 1, key, got[key], tally);
  for (uint64_t key = kCount; key-- > 0;) send(pair, 0, key, data, tally);
  check_through(tally);
  CHECK(std::all_of(got.begin(), got.end(), [&](const Data& each) { return each == data; }));
}

// Nobody looks after the peer: its end wakes who waits.
TEST_CASE("shared pair: what a peer sent before it left comes, and the rest fails", "[shm]") {
  auto pair = connect_pair();
  Tally small;
  Tally large;
  Tally lost;
  const Data data = content(kSmall, 1);
  const Data unsent = content(kLarge, 2);
  Data never(kSmall);
  for (uint64_t key = 0; key < 20; ++key) send(pair, 1, key, data, small);
  send(pair, 0, 200, unsent, lost);
  recv(pair, 0, 201, never, lost);
  probe(pair, 0, 202, lost);
  send(pair, 1, 300, unsent, large);  // ends with its sender
  check_through(small);
  pair[1]->shutdown();
  pair[1].reset();
  REQUIRE(lost.all_ended(kEnd));
  CHECK(lost.failed() == 3);
  CHECK(lost.why() == kShmGone);
  CHECK(large.all_ended(kEnd));
  CHECK(large.why().find("aborted") != std::string::npos);
  for (uint64_t key = 0; key < 20; ++key) {
    Tally received;
    Tally here;
    Data got(kSmall);
    probe(pair, 0, key, here);
    check_through(here);
    recv(pair, 0, key, got, received);
    check_through(received);
    CHECK((got == data));
  }
  Tally late;
  Data got(kLarge);
  recv(pair, 0, 300, got, late);  // was announced
  recv(pair, 0, 20, never, late);
  send(pair, 0, 400, data, late);
  probe(pair, 0, 401, late);
  REQUIRE(late.all_ended(kEnd));
  CHECK(late.failed() == 4);
  pair[0]->shutdown();
  Tally after;
  recv(pair, 0, 500, never, after);
  send(pair, 0, 501, data, after);
  probe(pair, 0, 502, after);
  CHECK(after.all_ended(milliseconds(0)));
  CHECK(after.failed() == 3);
}

TEST_CASE("shared pair: no byte is written once an abort has ended a receive", "[shm]") {
  for (int round = 0; round < 10; ++round) {
    auto pair = connect_pair();
    const Data data(16 << 20, 1);
    Data got(data.size(), 0);
    Tally out;
    Tally in;
    recv(pair, 1, 1, got, in);
    send(pair, 0, 1, data, out);
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    pair[1]->abort();
    REQUIRE(in.all_ended(kEnd));
    std::fill(got.begin(), got.end(), uint8_t{9});
    REQUIRE(out.all_ended(kEnd));
    std::this_thread::sleep_for(milliseconds(2));
    CHECK(std::all_of(got.begin(), got.end(), [](uint8_t byte) { return byte == 9; }));
  }
}

namespace {

// A peer that says and writes what it likes.
struct BadPeer {
  std::shared_ptr<ShmProgress> progress = std::make_shared<ShmProgress>(std::make_shared<Progress>());
  ShmProgress::Place place{progress};
  std::unique_ptr<ShmPipe> out = ShmPipe::create();
  std::unique_ptr<ShmPipe> in;
  LocalMeeting meeting;
  LocalMeeting::Peer good;
  std::unique_ptr<ShmPeer> peer;
  std::future<std::shared_ptr<ProbingTransport>> other;

  // The other rank waits for what this one has come to.
  void greet(
      int pipe, milliseconds limit = kEnd, const std::function<void()>& checkpoint = [] {}) {
    const auto address = std::make_shared<std::promise<std::string>>();
    auto its_address = address->get_future();
    other = std::async(std::launch::async, [this, address, limit, checkpoint] {
      ShmPairRendezvous rendezvous(std::make_shared<ShmProgress>(std::make_shared<Progress>()));
      address->set_value(rendezvous.address());
      return rendezvous.meet(0, 1, meeting.address(), Clock::now() + limit, checkpoint);
    });
    const uint32_t number = place.number();
    const LocalMeeting::Protocol protocol{0x6d637031, sizeof number, 1 + Doorbell::kFds, "shared memory"};
    auto met = meeting.meet(
        {{0, its_address.get()}, {1, meeting.address()}}, 1, protocol,
        [&](int32_t) {
          LocalMeeting::Greeting greeting{std::vector<std::byte>(sizeof number), progress->doorbell().fds()};
          greeting.descriptors.push_back(pipe);
          std::memcpy(greeting.bytes.data(), &number, sizeof number);
          return greeting;
        },
        Clock::now() + kEnd);
    good = std::move(met[0]);
  }
  // Fails where the other rank has closed the socket, which it may at once.
  void say(const std::string& text) const {
    static_cast<void>(::send(good.socket.get(), text.data(), text.size(), MSG_NOSIGNAL));
  }
  std::string heard() const {  // "" once the other rank has closed the socket
    pollfd entry{good.socket.get(), POLLIN, 0};
    REQUIRE(poll(&entry, 1, static_cast<int>(kEnd.count())) == 1);
    std::string text(1000, 0);
    ssize_t got = ::recv(entry.fd, text.data(), text.size(), 0);
    // It closed without reading what was said: that is told first, once.
    if (got < 0 && errno == ECONNRESET) got = ::recv(entry.fd, text.data(), text.size(), 0);
    text.resize(static_cast<size_t>(std::max<ssize_t>(0, got)));
    return text;
  }

  std::shared_ptr<ProbingTransport> meet() {
    greet(out->fd());
    say("+");
    CHECK(heard() == "+");
    uint32_t there = 0;
    std::memcpy(&there, good.bytes.data(), sizeof there);
    std::vector<int> doorbell;
    for (size_t i = 0; i < Doorbell::kFds; ++i) doorbell.push_back(good.descriptors[i].get());
    in = ShmPipe::open(good.descriptors[Doorbell::kFds].get());
    peer = std::make_unique<ShmPeer>(0, good.socket.release(), progress->doorbell_of_peer(doorbell), there);
    return other.get();
  }
};

std::string failure_of(std::future<std::shared_ptr<ProbingTransport>>& meeting, ErrorKind kind) {
  try {
    meeting.get();
  } catch (const Error& error) {
    CHECK(error.kind() == kind);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("shared pair: where one of two cannot use the memory, neither does, and both know why", "[shm]") {
  const int left = count_descriptors();
  {
    BadPeer bad;
    SECTION("this one") {
      const Descriptor unsealed(memfd_create("no pipe", 0));
      bad.greet(unsealed.get());
      SECTION("and the other could") { bad.say("+"); }
      SECTION("and the other could not") { bad.say("-of late"); }
      CHECK(bad.heard() == "-a peer's memory is not sealed");
      CHECK(failure_of(bad.other, ErrorKind::Generic) == "a peer's memory is not sealed");
    }
    SECTION("the other") {
      bad.greet(bad.out->fd());
      std::string why;
      SECTION("says why") {
        bad.say("-" + (why = "its memory is full"));
        why = "the other rank: " + why;
      }
      SECTION("exits") {
        bad.good.socket = Descriptor();
        why = "the other rank exited, or gave up";
      }
      SECTION("says nothing that is known") {
        bad.say("?");
        why = "the other rank exited, or gave up";
      }
      CHECK(failure_of(bad.other, ErrorKind::Generic) == why);
      if (bad.good.socket.get() >= 0) {
        CHECK(bad.heard() == "+");
        CHECK(bad.heard() == "");
      }
    }
    SECTION("nobody can say, since the other is frozen") {
      bad.greet(bad.out->fd(), milliseconds(1000));
      CHECK(failure_of(bad.other, ErrorKind::DeadlineExceeded) ==
            "the other rank did not say whether it has connected");
    }
    SECTION("this one is not wanted any longer") {
      std::atomic<bool> over{false};
      bad.greet(bad.out->fd(), kEnd, [&] {
        if (over) throw Error(ErrorKind::Aborted, "it was destroyed");
      });
      over = true;
      CHECK(failure_of(bad.other, ErrorKind::Aborted) == "it was destroyed");
    }
  }
  CHECK(count_descriptors() == left);
}

TEST_CASE("shared pair: a peer that writes nonsense ends the pair", "[shm]") {
  using Kind = ShmPipe::Kind;
  using Record = ShmPipe::Record;
  const Data data = content(kLarge, 1);
  const auto ends = [&](const std::function<void(BadPeer&)>& write) {
    Tally in;
    Tally out;
    Data got(kLarge, 9);
    BadPeer bad;
    Pair pair{bad.meet(), nullptr};
    recv(pair, 0, 5, got, in);
    send(pair, 0, 6, data, out);
    write(bad);
    bad.peer->call(ShmHalf::Sending);
    bad.peer->call(ShmHalf::Receiving);
    CHECK(soon([&] { return in.failed() + out.failed() > 0; }));
    bad.peer->hang_up();  // the other direction ends with it
    CHECK(soon([&] { return in.failed() + out.failed() == 2; }));
    CHECK((got == Data(kLarge, 9)));
    return std::pair(in.why(), out.why());
  };
  const std::string nonsense = "what it wrote to shared memory makes no sense";
  for (const uint64_t tail : {uint64_t{1} << 40, ~uint64_t{0}, uint64_t{1}, uint64_t{1} << 21}) {
    INFO("tail " << tail);
    CHECK(ends([&](BadPeer& bad) { bad.out->header().tail = tail; }).first == nonsense);
  }
  for (const Record& record :
       {Record{5, 100, 0, 1 << 30, Kind::Begin}, Record{5, kLarge, 64, 64, Kind::Begin},
        Record{5, kLarge, -1, 64, Kind::Piece}, Record{5, kLarge, kLarge, 64, Kind::Piece},
        Record{5, kLarge, 64, 64, Kind::Piece}, Record{5, kLarge + 1, 0, 64, Kind::Piece},
        Record{5, -1, 0, 0, Kind::Announce}, Record{5, kLarge, 0, 64, Kind::Announce},
        Record{5, 100, 0, 100, static_cast<Kind>(7)},
        Record{5, kLarge, 0, 4096, Kind::Begin}}) {  // longer than what was written
    INFO("record of " << record.nbytes << ", " << record.offset << ", " << record.count);
    CHECK(ends([&](BadPeer& bad) {
            std::memcpy(static_cast<void*>(&bad.out->header() + 1), &record, sizeof record);
            bad.out->header().tail = 256;
          }).first == nonsense);
  }
  for (const uint64_t head : {uint64_t{1} << 40, ~uint64_t{0}}) {
    CHECK(ends([&](BadPeer& bad) {
            bad.in->header().answers.push({6, static_cast<int64_t>(kLarge)});
            bad.in->header().head = head;
          }).second == nonsense);
  }
  CHECK(ends([&](BadPeer& bad) {
          auto* tail = reinterpret_cast<std::atomic<uint64_t>*>(
              reinterpret_cast<std::byte*>(&bad.in->header().answers) + 64);
          tail->store(uint64_t{ShmPipe::kMaxAnswers} + 1);
        }).second == nonsense);
}

TEST_CASE("shared pair: pairs leave a part of the budget to groups", "[shm]") {
  std::vector<std::unique_ptr<ShmPipe>> pipes;
  std::string refusal;
  while (refusal.empty() && pipes.size() < 1000) {
    try {
      pipes.push_back(ShmPipe::create());
    } catch (const std::runtime_error& error) {
      refusal = error.what();
    }
  }
  CHECK(pipes.size() >= 63);  // each with all others on a host of 64
  CHECK(refusal.find("64 MiB") != std::string::npos);
  CHECK(ShmRegion::create(1)->slot_bytes() == 128 * 1024);
  pipes.clear();
  CHECK(ShmPipe::create()->most() > 64 * 1024);
}
