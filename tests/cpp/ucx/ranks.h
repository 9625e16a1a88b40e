#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/tally.h"
#include "ucx/plane.h"

// Ranks as processes, each with a plane of its own, which tell each other their addresses through memory that
// they share. The library is loaded in them alone: the test's own process stays as it is.
namespace meshcast::testing {

constexpr int kMostRanks = 4;
constexpr auto kUcxLimit = std::chrono::seconds(60);  // of a process; one that hangs ends here

struct SharedRanks {
  struct Rank {
    std::atomic<bool> listens{false};
    std::array<char, 1024> address{};
    size_t length = 0;
    uint64_t process = 0;
    pid_t pid = 0;
    std::array<uint32_t, kMostRanks> breaks{};
    std::array<char, 256> error{};  // empty: all went well
  };
  std::array<Rank, kMostRanks> ranks;
  std::array<std::atomic<int>, 16> phases{};
};

// What one rank sees.
class UcxRank {
 public:
  UcxRank(SharedRanks& shared, int rank, int world, bool rdma)
      : rank(rank),
        world(world),
        shared_(shared),
        plane_(ucx::Plane::of_process({MESHCAST_UCX_LIBRARY, {""}, 60, rdma})) {
    SharedRanks::Rank& me = shared_.ranks[static_cast<size_t>(rank)];
    const ucx::Address address = plane_->address();
    me.length = address.rails.front().size();
    require(me.length <= me.address.size(), "the address fits");
    std::memcpy(me.address.data(), address.rails.front().data(), me.length);
    me.process = address.process;
    me.pid = getpid();
    me.listens = true;
    for (int other = 0; other < world; ++other) {
      SharedRanks::Rank& peer = shared_.ranks[static_cast<size_t>(other)];
      while (!peer.listens) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      addresses_.push_back({peer.process, {std::string(peer.address.data(), peer.length)}, {}});
    }
  }

  std::shared_ptr<ProbingTransport> join(uint64_t group) {
    return plane_->join(group, addresses_, rank, std::vector<int32_t>(addresses_.size(), 0));
  }
  std::function<std::string()> watch(int other) const {
    return plane_->watch(addresses_[static_cast<size_t>(other)]);
  }
  // What ranks tell each other before they join one more group.
  void tell_breaks(size_t phase) {
    const ucx::Address now = plane_->address();
    for (size_t other = 0; other < addresses_.size(); ++other) {
      const auto it = now.breaks.find(addresses_[other].process);
      shared_.ranks[static_cast<size_t>(rank)].breaks[other] = it == now.breaks.end() ? 0 : it->second;
    }
    meet(phase);
    for (size_t from = 0; from < addresses_.size(); ++from) {
      for (size_t to = 0; to < addresses_.size(); ++to) {
        addresses_[from].breaks[addresses_[to].process] = shared_.ranks[from].breaks[to];
      }
    }
  }
  void meet(size_t phase) {
    ++shared_.phases[phase];
    while (shared_.phases[phase] < world) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ucx::Plane& plane() const { return *plane_; }
  const std::vector<ucx::Address>& addresses() const { return addresses_; }
  pid_t pid_of(int other) const { return shared_.ranks[static_cast<size_t>(other)].pid; }

  static void require(bool true_one, const std::string& what) {
    if (!true_one) throw std::runtime_error(what);
  }

  const int rank;
  const int world;

 private:
  SharedRanks& shared_;
  const std::shared_ptr<ucx::Plane> plane_;
  std::vector<ucx::Address> addresses_;
};

// Runs `body` in `world` processes; answers what went wrong, by rank, or "" where nothing did. A rank that is
// killed says nothing. rdma: fragments are fetched, as devices do it; here UCX does it over TCP.
inline std::string in_processes(int world, const std::function<void(UcxRank&)>& body, bool rdma = false) {
  void* memory = mmap(nullptr, sizeof(SharedRanks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* shared = new (memory) SharedRanks;
  std::vector<pid_t> children;
  std::cout.flush();  // else a child that ends by exit() says it again
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    alarm(static_cast<unsigned>(kUcxLimit.count()));
    // UCX reads them while it is loaded: no signal handlers, no patches of libc, no word on stderr.
    setenv("UCX_DEBUG_SIGNO", "0", 1);
    setenv("UCX_MEM_EVENTS", "n", 1);
    setenv("UCX_LOG_LEVEL", "fatal", 1);
    int status = 0;
    try {
      UcxRank self(*shared, rank, world, rdma);
      body(self);
    } catch (const std::exception& error) {
      auto& text = shared->ranks[static_cast<size_t>(rank)].error;
      std::snprintf(text.data(), text.size(), "%s", error.what());
      status = 1;
    }
    _exit(status);
  }
  std::string wrong;
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    const char* said = shared->ranks[static_cast<size_t>(rank)].error.data();
    const bool hung = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;  // by the test
    if (*said != 0 || hung) {
      wrong += "rank " + std::to_string(rank) + ": " + (hung ? "hung" : said) + "; ";
    } else if (status != 0 && !killed) {
      wrong += "rank " + std::to_string(rank) + ": ended with wait status " + std::to_string(status) + "; ";
    }
  }
  munmap(memory, sizeof(SharedRanks));
  return wrong;
}

}  // namespace meshcast::testing
