#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "group/store.h"
#include "simulation/scheduler.h"
#include "transport/transport.h"

namespace meshcast::simulation {

// The process of a rank, as the scheduler numbers it.
inline uint64_t process_of(int rank) { return static_cast<uint64_t>(rank) + 1; }

// The store of a program, and what befalls it.
class Storage {
 public:
  enum class Health : uint8_t { Well, Slow, Frozen, Dead };

  explicit Storage(Scheduler& scheduler) : scheduler_(scheduler) {}
  std::shared_ptr<Store> connect();  // a connection of its own

  // Dead: from here on every request fails at once, also those that hang; it stays so.
  void become(Health health);
  void lose_all() { content_.clear(); }
  uint64_t requests() const { return requests_; }
  const std::map<std::string, std::string>& content() const { return content_; }

 private:
  class Connection;
  void request();  // takes its time; throws where the store is dead

  Scheduler& scheduler_;
  Health health_ = Health::Well;
  std::map<std::string, std::string> content_;
  uint64_t requests_ = 0;
};

// The network between the ranks of a group, in all its generations. Messages are matched by generation, rank
// and key, and take some time. A link may be cut, after which nothing arrives; a rank may die. Both ends learn
// of that after a while, or never.
class Network {
 public:
  // tells: it hands on what a rank says as it leaves, and knows of lost ranks without a message.
  Network(Scheduler& scheduler, int ranks, bool tells);
  ~Network();

  std::shared_ptr<Transport> join(int rank, const std::string& generation);
  bool has_joined(int rank) const { return ranks_joined_.count(rank) != 0; }  // any generation
  size_t joined(const std::string& generation) const;  // ranks that have, also those that have left
  // Why a rank sees no more of another, where it does, and this network tells.
  std::string lost(int rank, int other);
  bool tells() const { return tells_; }
  // From here on nothing passes between the two. noticed: after this time both see it; none: never.
  void cut(int one, int other, std::optional<Clock::duration> noticed);
  void half_open(int from, int to) { silent_.insert({from, to}); }  // in that direction, unseen
  void kill(int rank, Clock::duration noticed);                     // all its links
  void hang(int rank, Clock::duration lasts);        // its requests end so long after they were aborted
  void slow_down(Clock::duration by) { lag_ = by; }  // each message takes so much longer
  size_t in_flight() const;                          // messages that have not ended

 private:
  class Endpoint;
  struct Link {
    bool cut = false;
    bool noticed = false;
  };
  using Key = std::tuple<int, int, uint64_t>;         // from, to, key
  using Ends = std::vector<std::weak_ptr<Endpoint>>;  // by rank

  Link& link(int one, int other) { return links_[{std::min(one, other), std::max(one, other)}]; }
  void notice(int one, int other);
  void match(const std::string& generation, const Key& key);
  std::shared_ptr<Endpoint> end(const std::string& generation, int rank) const;

  Scheduler& scheduler_;
  const bool tells_;
  const size_t ranks_;
  std::map<std::string, Ends> generations_;
  std::map<std::string, size_t> joined_;
  std::set<int> ranks_joined_;
  std::map<std::pair<int, int>, Link> links_;
  std::set<std::pair<int, int>> silent_;  // from, to
  Clock::duration lag_{};
};

}  // namespace meshcast::simulation
