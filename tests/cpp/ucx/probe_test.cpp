// Messages that a rank learns of before it has memory for them, and those of another size than their receive.
#include <cstdint>
#include <string>
#include <vector>

#include "catch.h"
#include "ucx/ranks.h"

using namespace meshcast;
using namespace meshcast::testing;
using std::chrono::milliseconds;

namespace {

constexpr auto kEnd = milliseconds(20000);

std::vector<uint8_t> all(uint8_t value, size_t nbytes) {
  std::vector<uint8_t> out;
  for (size_t i = 0; i < nbytes; ++i) out.push_back(value);
  return out;
}

void probe(ProbingTransport& transport, int peer, uint64_t key, Tally& tally) {
  transport.probe({peer, 0, key}, tally.told());
}

void send(Transport& transport, int peer, uint64_t key, const std::vector<uint8_t>& data, Tally& tally) {
  transport.send({peer, 0, key}, static_cast<int64_t>(data.size()), tally.out(data.data()));
}

void recv(Transport& transport, int peer, uint64_t key, std::vector<uint8_t>& data, Tally& tally) {
  transport.recv({peer, 0, key}, static_cast<int64_t>(data.size()), tally.in(data.data()));
}

}  // namespace

TEST_CASE("a probe is told once its message is here, which stays", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(1);
          size_t phase = 0;
          uint64_t key = 0;
          for (const size_t nbytes : {size_t{0}, size_t{10}, size_t{1 << 20}}) {
            for (const bool early : {false, true}) {  // whether the probe comes before the message
              Tally sent;
              Tally here;
              Tally received;
              std::vector<uint8_t> data = all(self.rank == 0 ? 7 : 0, nbytes);
              if (self.rank == 1 && early) {
                probe(*transport, 0, key, here);
                UcxRank::require(!here.all_ended(milliseconds(20)), "nothing is here yet");
              }
              self.meet(phase++);
              if (self.rank == 0) send(*transport, 1, key, data, sent);
              if (self.rank == 1) {
                if (!early) std::this_thread::sleep_for(milliseconds(50));
                if (!early) probe(*transport, 0, key, here);
                UcxRank::require(here.all_ended(kEnd) && here.failed() == 0, "it is here");
                recv(*transport, 0, key, data, received);
                UcxRank::require(received.all_ended(kEnd) && received.failed() == 0, "it is received");
                UcxRank::require(data == all(7, nbytes), "its bytes are right");
              } else {
                UcxRank::require(sent.all_ended(kEnd) && sent.failed() == 0, "it is sent");
              }
              ++key;
            }
          }
          self.meet(phase++);
          Tally left;
          if (self.rank == 0) {
            probe(*transport, 1, key, left);
            self.meet(phase++);
            UcxRank::require(left.all_ended(kEnd) && left.failed() == 1, "who leaves ends a probe");
          } else {
            self.meet(phase++);
            transport->abort();
          }
          self.meet(phase++);
          transport->shutdown();
        }) == "");
}

// Rank 1 has not connected with rank 0 until it aborts.
TEST_CASE("a rank that leaves notifies those whose messages it has not taken", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          for (const size_t turn : {0, 1}) {
            const auto transport = self.join(60 + turn);
            Tally tally;
            std::vector<uint8_t> data = all(1, turn == 0 ? 100'000 : 1 << 20);
            if (self.rank == 0) {
              send(*transport, 1, 1, data, tally);
              UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 1, "the send fails");
            } else {
              std::this_thread::sleep_for(milliseconds(50));  // its beginning is here
              transport->abort();
            }
            self.meet(turn);
            transport->shutdown();
          }
        }) == "");
}

// A small one is on its way before anybody can compare.
TEST_CASE("a message of another size than its receive fails, at its sender too where it is large", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(2);
          constexpr size_t kEager = 100'000;  // goes at once, and waits for word of its receiver
          constexpr size_t kLarge = 1 << 20;
          const std::vector<std::pair<size_t, size_t>> sizes = {{10, 11},
                                                                {10, 9},
                                                                {0, 1},
                                                                {kLarge, kLarge + 1},
                                                                {kLarge, kLarge - 1},
                                                                {kLarge, 10},
                                                                {10, kLarge},
                                                                {kEager, kEager + 1},
                                                                {kEager, 10},
                                                                {10, kEager},
                                                                {kEager, kLarge},
                                                                {kLarge, kEager}};
          uint64_t key = 0;
          for (const bool early : {false, true}) {
            for (const auto& [sent, expected] : sizes) {
              Tally tally;
              Tally wrong;
              std::vector<uint8_t> data = all(0, self.rank == 0 ? sent : expected);
              std::vector<uint8_t> next = all(self.rank == 0 ? 5 : 0, 100);
              if (self.rank == 0) {
                if (early) std::this_thread::sleep_for(milliseconds(5));
                const bool large = sent != 10 && sent != 0;
                send(*transport, 1, key, data, large ? wrong : tally);
                send(*transport, 1, key + 1, next, tally);
                UcxRank::require(wrong.all_ended(kEnd) && wrong.failed() == (large ? 1 : 0), "it fails here");
              } else {
                if (!early) std::this_thread::sleep_for(milliseconds(5));
                recv(*transport, 0, key, data, wrong);
                UcxRank::require(wrong.all_ended(kEnd) && wrong.failed() == 1, "it fails");
                UcxRank::require(wrong.why() == "a message of " + std::to_string(sent) +
                                                    " bytes met a receive of " + std::to_string(expected),
                                 wrong.why());
                recv(*transport, 0, key + 1, next, tally);
              }
              UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "all else is through");
              UcxRank::require(next == all(5, 100), "the next message is right");
              key += 2;
            }
          }
          self.meet(0);
          transport->shutdown();
        }) == "");
}
