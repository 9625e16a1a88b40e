// The data plane over UCX, between processes of this machine.
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <malloc.h>
#include <sys/resource.h>

#include "catch.h"
#include "common/error.h"
#include "ucx/process_plane.h"
#include "ucx/ranks.h"

using namespace meshcast;
using namespace meshcast::testing;
using std::chrono::milliseconds;

namespace {

constexpr auto kEnd = milliseconds(20000);  // for messages that have to end

std::vector<uint8_t> filled(int64_t nbytes, int seed) {
  std::vector<uint8_t> out(static_cast<size_t>(nbytes));
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761U + 1;
  for (uint8_t& byte : out) byte = static_cast<uint8_t>((state = state * 1664525U + 1013904223U) >> 24);
  return out;
}

void send(Transport& transport, int peer, uint64_t key, const std::vector<uint8_t>& data, Tally& tally) {
  transport.send({peer, 0, key}, static_cast<int64_t>(data.size()), tally.out(data.data(), key % 2 == 1));
}

void recv(Transport& transport, int peer, uint64_t key, std::vector<uint8_t>& data, Tally& tally) {
  transport.recv({peer, 0, key}, static_cast<int64_t>(data.size()), tally.in(data.data()));
}

[[maybe_unused]] int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// How often this thread has read from files; none where the kernel does not count that.
std::optional<int64_t> reads_made() {
  std::ifstream counters("/proc/thread-self/io");
  std::string name;
  for (int64_t count = 0; counters >> name >> count;)
    if (name == "syscr:") return count;
  return std::nullopt;
}

// Says how many threads UCX has when this process ends: its destructor runs after all that the
// plane has left to be done then, as it was there before.
struct AtEnd {
  std::atomic<int>* seen = nullptr;
  ~AtEnd() {
    if (!seen) return;
    *seen = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      *seen += name == "async" ? 1 : 0;
    }
    _exit(0);
  }
} at_end;

// A message that has to be packed, and no memory to do so.
class Unpackable final : public Outgoing {
 public:
  explicit Unpackable(std::unique_ptr<Outgoing> inner) : inner_(std::move(inner)) {}
  const std::byte* packed() override { return nullptr; }
  void read(int64_t offset, int64_t nbytes, std::byte* out) override {
    if (offset > 0) throw std::bad_alloc();
    inner_->read(offset, nbytes, out);
  }
  void finished() override { inner_->finished(); }
  void failed(int peer, const TransportError& error) override { inner_->failed(peer, error); }

 private:
  const std::unique_ptr<Outgoing> inner_;
};

// Looks at memory that is being received into, which ThreadSanitizer would not let pass.
__attribute__((noinline, no_sanitize_thread)) bool begun(const volatile uint8_t& first) { return first != 0; }

// As /proc has it: 'T' is stopped.
bool in_state(pid_t process, char state) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(process) + "/stat"), stat);
  const size_t end = stat.rfind(')');
  return end != std::string::npos && end + 2 < stat.size() && stat[end + 2] == state;
}

}  // namespace

TEST_CASE("messages of all sizes arrive, posted early or late, driven or not", "[ucx]") {
  const bool rdma = GENERATE(false, true);
  CHECK(in_processes(
            2,
            [](UcxRank& self) {
              const auto transport = self.join(1);
              const int peer = 1 - self.rank;
              uint64_t key = 0;
              for (const int64_t nbytes : {1, 100, 8191, 8192, 8193, 300000, 1 << 22}) {
                for (const int turn : {0, 1, 2, 3}) {
                  Tally tally;
                  const auto out = filled(nbytes, self.rank + turn);
                  std::vector<uint8_t> in(out.size());
                  if (turn % 2 == self.rank) std::this_thread::sleep_for(milliseconds(3));
                  recv(*transport, peer, key, in, tally);
                  send(*transport, peer, key, out, tally);
                  if (turn > 1)
                    drive(
                        {transport->source()}, [&] { return tally.all_ended(milliseconds(0)); },
                        Clock::now() + kEnd);
                  UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "all are through");
                  UcxRank::require(in == filled(nbytes, peer + turn), "the bytes are those that were sent");
                  ++key;
                }
              }
              self.meet(0);
              transport->shutdown();
            },
            rdma) == "");
}

// UCX reads the route of an interface from a file, in two reads, whenever it weighs ways of sending.
TEST_CASE("a connection reads next to nothing from the system", "[ucx]") {
  if (!reads_made()) return;
  CHECK(in_processes(3, [](UcxRank& self) {
          const auto transport = self.join(1);
          std::vector<int64_t> reads;
          for (const int step : {1, 2}) {
            const int64_t before = *reads_made();
            UcxRank::require(transport->lost((self.rank + step) % 3).empty(), "the peer is there");  // connects
            reads.push_back(*reads_made() - before);
          }
          const std::string found = std::to_string(reads[0]) + " and " + std::to_string(reads[1]);
          UcxRank::require(reads[0] < 100 && reads[1] < 7, "reads: " + found);
          self.meet(0);
          transport->shutdown();
        }) == "");
}

TEST_CASE("a sender far ahead of its receiver waits in the end, and all arrives in any order", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          constexpr int kCount = 500;
          const auto transport = self.join(2);
          std::vector<std::vector<uint8_t>> data;
          const auto size = [](int i) { return i % 5 == 0 ? 0 : 64 + i; };
          for (int i = 0; i < kCount; ++i) data.push_back(filled(size(i), self.rank == 0 ? i : -1));
          Tally tally;
          if (self.rank == 0) {
            for (int i = 0; i < kCount; ++i) send(*transport, 1, static_cast<uint64_t>(i), data[i], tally);
            UcxRank::require(!tally.all_ended(milliseconds(50)), "some wait for their receives");
          }
          self.meet(0);
          if (self.rank == 1) {
            for (int i = kCount - 1; i >= 0; --i) recv(*transport, 0, static_cast<uint64_t>(i), data[i], tally);
          }
          UcxRank::require(tally.all_ended(kEnd), "all ended");
          UcxRank::require(tally.failed() == 0, "none failed " + tally.why());
          for (int i = 0; i < kCount; ++i) UcxRank::require(data[i] == filled(size(i), i), "bytes are right");
          self.meet(1);
          transport->shutdown();
        }) == "");
}

TEST_CASE("a death ends what waits for that rank, and nothing else", "[ucx]") {
  CHECK(in_processes(3, [](UcxRank& self) {
          const auto transport = self.join(3);
          Tally lost;
          Tally alive;
          std::vector<uint8_t> large(32 << 20);
          std::vector<uint8_t> small(100);
          std::vector<uint8_t> other(1 << 20);
          self.meet(0);
          if (self.rank == 1) {
            Tally mine;
            recv(*transport, 0, 1, large, mine);
            std::this_thread::sleep_for(milliseconds(5));
            kill(getpid(), SIGKILL);
          }
          if (self.rank == 0) {
            send(*transport, 1, 1, large, lost);
            recv(*transport, 1, 2, small, lost);
          } else {
            recv(*transport, 1, 3, small, lost);  // it has never heard of rank 1
          }
          UcxRank::require(lost.all_ended(kEnd), "messages with the dead rank end");
          UcxRank::require(lost.failed() >= 1, "they fail");
          send(*transport, 2 - self.rank, 4, other, alive);
          std::vector<uint8_t> in(other.size());
          recv(*transport, 2 - self.rank, 4, in, alive);
          UcxRank::require(alive.all_ended(kEnd) && alive.failed() == 0, "others go on");
          Tally late;
          send(*transport, 1, 9, small, late);
          UcxRank::require(late.all_ended(kEnd) && late.failed() == 1, "later messages fail at once");
          transport->shutdown();
        }) == "");
}

TEST_CASE("a rank that leaves says why, and what waits for it fails at once", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(14);
          Tally tally;
          std::vector<uint8_t> data(1 << 20);
          if (self.rank == 0) {
            recv(*transport, 1, 1, data, tally);
            UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "a message that connects them");
            UcxRank::require(transport->told(1).empty(), "nothing is told yet");
            recv(*transport, 1, 2, data, tally);
            self.meet(0);
            UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 1, "the receive fails");
            UcxRank::require(transport->told(1) == "rank 7 died", "the cause is there: " + transport->told(1));
          } else {
            send(*transport, 0, 1, data, tally);
            UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "a message that connects them");
            self.meet(0);
            transport->leave_because("rank 7 died");
            transport->abort();
          }
          self.meet(1);
          transport->shutdown();
        }) == "");
}

TEST_CASE("after an abort nothing is written, though a frozen sender goes on", "[ucx]") {
  const bool rdma = GENERATE(false, true);
  CHECK(in_processes(
            3,
            [](UcxRank& self) {
              constexpr int64_t kBytes = 256 << 20;
              const auto transport = self.join(4);
              const auto bystander = self.join(5);
              Tally tally;
              self.meet(0);
              if (self.rank == 1) {
                std::vector<uint8_t> data(kBytes, 1);
                send(*transport, 0, 1, data, tally);
                tally.all_ended(kEnd);  // as it will
                self.meet(1);
                transport->shutdown();
              } else if (self.rank == 0) {
                std::vector<uint8_t> data(kBytes, 0);
                recv(*transport, 1, 1, data, tally);
                while (!begun(data[0])) std::this_thread::yield();
                kill(self.pid_of(1), SIGSTOP);
                std::this_thread::sleep_for(milliseconds(20));
                transport->abort();
                const bool ended = tally.all_ended(kEnd);
                std::memset(data.data(), 0, data.size());
                kill(self.pid_of(1), SIGCONT);
                UcxRank::require(ended, "the receive ends");
                if (tally.failed() == 1) {
                  std::this_thread::sleep_for(milliseconds(500));
                  const int64_t late = std::accumulate(data.begin(), data.end(), int64_t{0});
                  UcxRank::require(late == 0, std::to_string(late) + " late bytes");
                }
                self.meet(1);
                transport->shutdown();
              } else {
                self.meet(1);
                transport->shutdown();
              }
              Tally others;
              std::vector<uint8_t> data(1 << 20);
              if (self.rank == 0) send(*bystander, 2, 1, data, others);
              if (self.rank == 2) recv(*bystander, 0, 1, data, others);
              UcxRank::require(others.all_ended(kEnd) && others.failed() == 0, "another group goes on");
              self.meet(2);
              bystander->shutdown();
              self.tell_breaks(4);
              const auto again = self.join(6);
              Tally counted;
              std::vector<uint8_t> out = filled(1 << 20, self.rank);
              if (self.rank < 2) send(*again, 1 - self.rank, 1, out, counted);
              if (self.rank < 2) recv(*again, 1 - self.rank, 1, data, counted);
              UcxRank::require(counted.all_ended(kEnd), "messages of a new group end");
              UcxRank::require(counted.failed() == 0, "a new group connects again: " + counted.why());
              UcxRank::require(self.rank == 2 || data == filled(1 << 20, 1 - self.rank), "its bytes are right");
              self.meet(3);
              again->shutdown();
            },
            rdma) == "");
}

// Sanitizers keep memory that was given back.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("messages to be packed for slow peers take bounded memory", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          constexpr int kLines = 40;  // as many peers would have
          constexpr int64_t kBytes = 32 << 20;
          std::vector<uint8_t> data = filled(kBytes, self.rank);
          Tally tally;
          std::vector<std::shared_ptr<ProbingTransport>> groups;
          for (int i = 0; i < kLines; ++i) groups.push_back(self.join(static_cast<uint64_t>(20 + i)));
          std::vector<uint8_t> asked(8);
          if (self.rank == 1) {
            for (const auto& group : groups) recv(*group, 0, 1, data, tally);
            send(*groups.back(), 0, 2, asked, tally);
          } else {
            Tally told;
            recv(*groups.back(), 1, 2, asked, told);
            UcxRank::require(told.all_ended(kEnd), "what rank 1 receives is known");
          }
          malloc_trim(0);  // what earlier tests have left free counts as resident
          const int64_t before = resident_bytes();
          if (self.rank == 0) {
            // Frozen before anything is sent: on a loaded machine a moment later may be after all has arrived.
            kill(self.pid_of(1), SIGSTOP);
            for (const auto& group : groups) send(*group, 1, 1, data, tally);
            for (int i = 0; i < 20000 && resident_bytes() - before <= 16 << 20; ++i)
              std::this_thread::sleep_for(milliseconds(1));
            std::this_thread::sleep_for(milliseconds(500));
            const int64_t taken = resident_bytes() - before;
            const bool left = !tally.all_ended(milliseconds(0));
            kill(self.pid_of(1), SIGCONT);
            UcxRank::require(left, "the peer was slow");
            UcxRank::require(taken > 16 << 20, "fragments wait: " + std::to_string(taken));
            UcxRank::require(taken < 64 << 20, "fragments take bounded memory: " + std::to_string(taken));
          }
          UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "all arrive " + tally.why());
          UcxRank::require(data == filled(kBytes, 0), "bytes are right");
          self.meet(1);
          for (const auto& group : groups) group->shutdown();
        }) == "");
}
#endif

TEST_CASE("ranks that only ask for a peer know when it has died, and not before", "[ucx]") {
  CHECK(in_processes(3, [](UcxRank& self) {
          const auto transport = self.join(9);
          const auto watch = self.watch(2);
          const auto lost = [&](milliseconds limit) {
            const TimePoint end = Clock::now() + limit;
            std::string group;
            std::string process;
            while (Clock::now() < end && (group.empty() || process.empty())) {
              // Rank 0 asks both ways, rank 1 has never heard of rank 2 when that dies.
              if (group.empty()) group = transport->lost(2);
              if (process.empty()) process = watch();
              std::this_thread::sleep_for(milliseconds(5));
            }
            return std::pair{group, process};
          };
          if (self.rank == 0) {
            const auto [group, process] = lost(milliseconds(300));
            UcxRank::require(group.empty() && process.empty(), "it lives: " + group + process);
          }
          self.meet(0);
          if (self.rank == 2) kill(getpid(), SIGKILL);
          if (self.rank == 1) std::this_thread::sleep_for(milliseconds(200));
          const auto [group, process] = lost(milliseconds(2000));
          UcxRank::require(!group.empty(), "the group knows");
          UcxRank::require(!process.empty(), "the watch knows");
          for (const std::string& why : {group, process})
            UcxRank::require(why.find("MESHCAST_IFNAMES") == std::string::npos, "not the interface: " + why);
          transport->shutdown();
        }) == "");
}

TEST_CASE("a watch outlives a connection that was given up", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(10);
          const auto watch = self.watch(1 - self.rank);
          std::vector<uint8_t> data(64 << 20);
          Tally tally;
          watch();
          self.meet(0);
          if (self.rank == 1) {
            send(*transport, 0, 1, data, tally);
            self.meet(1);
          } else {
            recv(*transport, 1, 1, data, tally);
            kill(self.pid_of(1), SIGSTOP);
            std::this_thread::sleep_for(milliseconds(20));
            transport->abort();  // breaks the connection once its grace is over
            std::this_thread::sleep_for(milliseconds(700));
            watch();  // notices, and connects again
            kill(self.pid_of(1), SIGCONT);
            std::this_thread::sleep_for(milliseconds(300));
            const std::string why = watch();
            UcxRank::require(why.empty(), "the other process lives: " + why);
            self.meet(1);
          }
          transport->shutdown();
        }) == "");
}

TEST_CASE("messages that a rank drops as it leaves are not told as sent", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(7);
          Tally tally;
          std::vector<uint8_t> large(1 << 20);
          std::vector<uint8_t> small(100);
          if (self.rank == 0) {
            send(*transport, 1, 1, large, tally);
            send(*transport, 1, 2, large, tally);
            recv(*transport, 1, 3, small, tally);
            UcxRank::require(!tally.all_ended(milliseconds(50)), "they wait for their receives");
          }
          self.meet(0);
          if (self.rank == 1) {
            transport->abort();  // it has never connected with rank 0
          } else {
            UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 3, "all of them fail");
            UcxRank::require(tally.why() == "the peer has left the group", tally.why());
          }
          self.meet(1);
          transport->shutdown();
        }) == "");
}

TEST_CASE("a forked child leaves the connections alone", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          auto transport = self.join(6);
          const int peer = 1 - self.rank;
          for (const uint64_t round : {0, 1}) {
            Tally tally;
            const auto out = filled(20000, self.rank);
            std::vector<uint8_t> in(out.size());
            recv(*transport, peer, round, in, tally);
            send(*transport, peer, round, out, tally);
            UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "all are through");
            self.meet(2 * round);
            if (round == 1) break;
            const pid_t child = fork();
            if (child == 0) {
              Tally refused;
              send(*transport, peer, 7, out, refused);
              const bool told = refused.all_ended(milliseconds(0)) && refused.failed() == 1;
              transport->shutdown();
              transport.reset();
              _exit(told ? 0 : 1);
            }
            int status = 0;
            waitpid(child, &status, 0);
            UcxRank::require(status == 0, "the child is refused, and ends");
            self.meet(2 * round + 1);
          }
          transport->shutdown();
        }) == "");
}

TEST_CASE("a process that ends while it has groups leaves nothing running in UCX", "[ucx]") {
  constexpr size_t kRanks = 2;
  void* memory = mmap(nullptr, sizeof(std::array<std::atomic<int>, kRanks>), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& seen = *new (memory) std::array<std::atomic<int>, kRanks>{-1, -1};
  CHECK(in_processes(kRanks, [&](UcxRank& self) {
          static const auto* const kept = new std::shared_ptr<ProbingTransport>(self.join(77));
          static Tally tally;
          const int peer = 1 - self.rank;
          const auto out = filled(300000, self.rank);
          static std::vector<uint8_t> in(out.size());
          recv(**kept, peer, 1, in, tally);
          send(**kept, peer, 1, out, tally);
          UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "all are through");
          recv(**kept, peer, 2, in, tally);  // never sent
          self.meet(0);
          at_end.seen = &seen[static_cast<size_t>(self.rank)];
          std::exit(0);
        }) == "");
  CHECK(seen[0] == 0);
  CHECK(seen[1] == 0);
  munmap(memory, sizeof(seen));
}

// As where one thread ends its group while another ends the process: UCX is in the middle of sending then.
TEST_CASE("a group that goes while the process ends leaves nothing behind that UCX calls", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          auto transport = self.join(78);
          static Tally tally;
          static const auto out = filled(int64_t{8} << 20, 1);
          static std::vector<uint8_t> in(out.size());
          if (self.rank == 1) {
            recv(*transport, 0, 1, in, tally);
            self.meet(0);
            raise(SIGSTOP);  // takes nothing more, and lives
          } else {
            self.meet(0);
            while (!in_state(self.pid_of(1), 'T')) std::this_thread::sleep_for(milliseconds(1));
            send(*transport, 1, 1, out, tally);
            std::this_thread::sleep_for(milliseconds(100));  // until the connection is full
            auto& plane = static_cast<ucx::ProcessPlane&>(self.plane());
            plane.stop();
            transport.reset();
            std::vector<std::vector<char>> over(64, std::vector<char>(4096, 'x'));  // where the group was
            kill(self.pid_of(1), SIGCONT);
            plane.end_with_process();
            UcxRank::require(tally.all_ended(milliseconds(0)) || tally.failed() == 0, "nothing is told twice");
          }
        }) == "");
}

TEST_CASE("what ranks told of their rails is checked before it is used", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto refused = [&](std::vector<ucx::Address> members, int rank, std::vector<int32_t> first) {
            try {
              self.plane().join(79, std::move(members), rank, std::move(first));
            } catch (const Error& error) {
              return error.kind() == ErrorKind::Layout;
            }
            return false;
          };
          auto none = self.addresses();
          none[1].rails.clear();
          auto more = self.addresses();
          more[1].rails.push_back(more[1].rails.front());
          UcxRank::require(refused(none, self.rank, {0, 0}), "no rail is refused");
          UcxRank::require(refused(more, self.rank, {0, 0}), "more rails than here are refused");
          UcxRank::require(refused(self.addresses(), self.rank, {0, -1}), "a negative rail is refused");
          UcxRank::require(refused(self.addresses(), self.rank, {0}), "a rail for each rank is needed");
          UcxRank::require(refused(self.addresses(), 2, {0, 0}), "a rank outside is refused");
          const auto transport = self.join(80);
          Tally tally;
          std::vector<uint8_t> data(10);
          if (self.rank == 0) send(*transport, 1, 1, data, tally);
          if (self.rank == 1) recv(*transport, 0, 1, data, tally);
          UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "the rest goes on");
          self.meet(0);
        }) == "");
}

TEST_CASE("a message that there is no memory to pack fails, and its group goes on", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(81);
          constexpr int64_t kBytes = int64_t{4} << 20;  // several fragments
          Tally starved;
          Tally tally;
          const auto out = filled(kBytes, 3);
          std::vector<uint8_t> in(out.size());
          if (self.rank == 0) {
            for (uint64_t key = 0; key < 3; ++key)  // those behind it wait for the same connection
              transport->send({1, 0, key}, kBytes, std::make_unique<Unpackable>(starved.out(out.data(), true)));
            UcxRank::require(starved.all_ended(kEnd) && starved.failed() == 3, "each fails");
            UcxRank::require(starved.why() == "no memory for a message", "it says why: " + starved.why());
            send(*transport, 1, 10, out, tally);
          } else {
            for (uint64_t key = 0; key < 3; ++key) recv(*transport, 0, key, in, starved);
            recv(*transport, 0, 10, in, tally);
          }
          UcxRank::require(tally.all_ended(kEnd) && tally.failed() == 0, "another message arrives");
          self.meet(0);
          transport->shutdown();
        }) == "");
}

TEST_CASE("what is no message of this build is not read as one", "[ucx]") {
  ucx::Header header{1, 2, 3, 0, 0, 10};
  REQUIRE(ucx::read_header(&header, sizeof(header)));
  CHECK(ucx::read_header(&header, sizeof(header))->key == 2);
  CHECK_FALSE(ucx::read_header(&header, sizeof(header) - 8));
  ++header.magic;  // of the next version
  CHECK_FALSE(ucx::read_header(&header, sizeof(header)));
}

TEST_CASE("nothing wakes up while nothing moves", "[ucx]") {
  CHECK(in_processes(2, [](UcxRank& self) {
          const auto transport = self.join(8);
          Tally tally;
          std::vector<uint8_t> data(10);
          if (self.rank == 0) send(*transport, 1, 1, data, tally);
          if (self.rank == 1) recv(*transport, 0, 1, data, tally);
          UcxRank::require(tally.all_ended(kEnd), "it is through");
          self.meet(0);
          rusage before{};
          rusage after{};
          getrusage(RUSAGE_SELF, &before);
          std::this_thread::sleep_for(milliseconds(1000));
          getrusage(RUSAGE_SELF, &after);
          UcxRank::require(after.ru_nvcsw - before.ru_nvcsw < 20, "hardly any wake-up in a second");
          self.meet(1);
          transport->shutdown();
        }) == "");
}
