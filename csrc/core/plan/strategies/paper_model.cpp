#include "plan/strategies/paper_model.h"

#include <algorithm>

namespace meshcast {
namespace {

constexpr int kGreedyRounds = 100;
constexpr int64_t kGreedySteps = 20'000'000;  // work visits; beyond this, fewer rounds are drawn
constexpr size_t kGreedyWindow = 4096;        // works to draw from at a time, in natural order
constexpr int64_t kSearchNodes = 200'000;

// A fixed algorithm, so that a seed gives the same numbers on every platform.
class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}
  uint64_t below(uint64_t n) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * n) >> 64);
  }

 private:
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

PaperOrder natural_order(const std::vector<PaperWork>& works, int32_t hosts, bool by_load) {
  PaperOrder out;
  std::vector<int64_t> load(static_cast<size_t>(hosts), 0);
  for (size_t w = 0; w < works.size(); ++w) {
    int32_t sender = works[w].senders.front();
    for (const int32_t host : works[w].senders) {
      if (by_load && load[static_cast<size_t>(host)] < load[static_cast<size_t>(sender)]) sender = host;
    }
    load[static_cast<size_t>(sender)] += works[w].nbytes;
    out.work.push_back(static_cast<int32_t>(w));
    out.sender.push_back(sender);
  }
  return out;
}

// The randomized greedy of the paper (Zhuang et al., arXiv 2211.05322): sets of works that share no host run in
// parallel, one set after the other. Here a set only fixes the order of submission, since our works are
// pipelined.
class Greedy {
 public:
  Greedy(const std::vector<PaperWork>& works, int32_t hosts, uint64_t seed)
      : works_(works),
        random_(seed),
        load_(static_cast<size_t>(hosts), 0),
        busy_(static_cast<size_t>(hosts), 0) {}

  PaperOrder run() {
    PaperOrder out;
    std::vector<int32_t> open;
    std::vector<char> taken(works_.size(), 0);
    int32_t next = 0;
    int64_t steps = kGreedySteps;
    // Phase 1 of a step: works to draw from, and the affordable number of draws. Each step takes at most a
    // quarter of the visits that are left, but at least one draw.
    while (true) {
      while (open.size() < kGreedyWindow && static_cast<size_t>(next) < works_.size()) open.push_back(next++);
      if (open.empty()) break;
      const int64_t affordable = steps / (4 * static_cast<int64_t>(open.size()) + 1);
      const int64_t rounds = std::clamp<int64_t>(affordable, 1, kGreedyRounds);
      steps -= std::min(steps, rounds * static_cast<int64_t>(open.size()));
      // Phase 2: the best of several draws. More parallel works come first, then even loads of senders.
      PaperOrder best;
      __int128 best_spread = 0;
      for (int64_t r = 0; r < rounds; ++r) {
        PaperOrder drawn = draw(open);
        const __int128 even = spread(drawn);
        if (drawn.work.size() > best.work.size() ||
            (drawn.work.size() == best.work.size() && even < best_spread)) {
          best = std::move(drawn);
          best_spread = even;
        }
      }
      // Phase 3: append it. It has at least one work, since the first one drawn finds no busy host.
      for (size_t i = 0; i < best.work.size(); ++i) {
        load_[static_cast<size_t>(best.sender[i])] += works_[static_cast<size_t>(best.work[i])].nbytes;
        out.work.push_back(best.work[i]);
        out.sender.push_back(best.sender[i]);
        taken[static_cast<size_t>(best.work[i])] = 1;
      }
      open.erase(
          std::remove_if(open.begin(), open.end(), [&](int32_t w) { return taken[static_cast<size_t>(w)]; }),
          open.end());
    }
    return out;
  }

 private:
  // A maximal set in random order (Fisher-Yates, from the end). busy_ holds the number of the round, so that
  // nothing has to be cleared between draws.
  PaperOrder draw(std::vector<int32_t> open) {
    PaperOrder out;
    ++round_;
    for (size_t n = open.size(); n > 0; --n) {
      std::swap(open[n - 1], open[random_.below(n)]);
      const PaperWork& work = works_[static_cast<size_t>(open[n - 1])];
      const auto busy = [&](int32_t host) { return busy_[static_cast<size_t>(host)] == round_; };
      if (std::any_of(work.receivers.begin(), work.receivers.end(), busy)) continue;
      const int32_t sender = draw_sender(work);
      if (sender < 0) continue;
      busy_[static_cast<size_t>(sender)] = round_;
      for (const int32_t host : work.receivers) busy_[static_cast<size_t>(host)] = round_;
      out.work.push_back(open[n - 1]);
      out.sender.push_back(sender);
    }
    return out;
  }

  // One of the idle holder hosts, with weight (most load - its load + 1).
  int32_t draw_sender(const PaperWork& work) {
    int64_t most = 0;
    for (const int32_t host : work.senders) most = std::max(most, load_[static_cast<size_t>(host)]);
    unsigned __int128 total = 0;
    for (const int32_t host : work.senders) {
      if (busy_[static_cast<size_t>(host)] != round_)
        total += static_cast<uint64_t>(most - load_[static_cast<size_t>(host)] + 1);
    }
    if (total == 0) return -1;
    // Loads are below 2^62 and hosts few: the sum is cut to 64 bits without harm.
    auto pick = random_.below(static_cast<uint64_t>(std::min<unsigned __int128>(total, UINT64_MAX)));
    for (const int32_t host : work.senders) {
      if (busy_[static_cast<size_t>(host)] == round_) continue;
      const auto weight = static_cast<uint64_t>(most - load_[static_cast<size_t>(host)] + 1);
      if (pick < weight) return host;
      pick -= weight;
    }
    return -1;
  }

  // Variance of the sender loads after a set, up to a constant factor and offset.
  __int128 spread(const PaperOrder& drawn) {
    for (size_t i = 0; i < drawn.work.size(); ++i) {
      load_[static_cast<size_t>(drawn.sender[i])] += works_[static_cast<size_t>(drawn.work[i])].nbytes;
    }
    __int128 sum = 0;
    for (const int64_t l : load_) sum += l;
    const auto mean = static_cast<int64_t>(sum / static_cast<int64_t>(load_.size()));
    __int128 out = 0;
    for (const int64_t l : load_) out += static_cast<__int128>((l - mean) / 1024) * ((l - mean) / 1024);
    for (size_t i = 0; i < drawn.work.size(); ++i) {
      load_[static_cast<size_t>(drawn.sender[i])] -= works_[static_cast<size_t>(drawn.work[i])].nbytes;
    }
    return out;
  }

  const std::vector<PaperWork>& works_;
  SplitMix random_;
  std::vector<int64_t> load_;
  std::vector<int64_t> busy_;  // round in which a host was last taken
  int64_t round_ = 0;
};

// Branch and bound over orders. A host's clock plus its remaining work is a lower bound of the end. Every
// sender of every work is tried at every depth, so on large problems the budget of nodes ends it early; the
// result is never worse than greedy's.
class Search {
 public:
  Search(const std::vector<PaperWork>& works, int32_t hosts, PaperOrder start)
      : works_(works),
        clock_(static_cast<size_t>(hosts), 0),
        rest_(static_cast<size_t>(hosts), 0),
        used_(works.size(), 0),
        best_(std::move(start)),
        best_end_(paper_makespan(works, hosts, best_)) {
    for (const PaperWork& work : works) add_rest(work, 1);
  }

  PaperOrder run() {
    descend(0);
    return best_;
  }

 private:
  // Work that a host cannot avoid: works that it receives, and works that only it can send.
  void add_rest(const PaperWork& work, int sign) {
    for (const int32_t host : work.receivers) rest_[static_cast<size_t>(host)] += sign * work.nbytes;
    if (work.senders.size() == 1) rest_[static_cast<size_t>(work.senders.front())] += sign * work.nbytes;
  }

  void descend(int64_t end) {
    if (current_.work.size() == works_.size()) {
      if (end < best_end_) {
        best_end_ = end;
        best_ = current_;
      }
      return;
    }
    // A budget of nodes and not of time: all ranks must stop at the same place.
    if (--nodes_ < 0) return;
    for (size_t h = 0; h < clock_.size(); ++h) {
      if (clock_[h] + rest_[h] >= best_end_) return;
    }
    for (size_t w = 0; w < works_.size() && nodes_ >= 0; ++w) {
      if (used_[w]) continue;
      const PaperWork& work = works_[w];
      for (const int32_t sender : work.senders) {
        std::vector<std::pair<int32_t, int64_t>> saved;
        int64_t start = 0;
        const auto touch = [&](int32_t host) {
          saved.emplace_back(host, clock_[static_cast<size_t>(host)]);
          start = std::max(start, clock_[static_cast<size_t>(host)]);
        };
        touch(sender);
        for (const int32_t host : work.receivers) touch(host);
        for (const auto& [host, before] : saved) clock_[static_cast<size_t>(host)] = start + work.nbytes;
        used_[w] = 1;
        add_rest(work, -1);
        current_.work.push_back(static_cast<int32_t>(w));
        current_.sender.push_back(sender);
        descend(std::max(end, start + work.nbytes));
        current_.work.pop_back();
        current_.sender.pop_back();
        add_rest(work, 1);
        used_[w] = 0;
        // A sender that is also a receiver was saved twice, with the same clock.
        for (const auto& [host, before] : saved) clock_[static_cast<size_t>(host)] = before;
      }
    }
  }

  const std::vector<PaperWork>& works_;
  std::vector<int64_t> clock_, rest_;
  std::vector<char> used_;
  PaperOrder current_, best_;
  int64_t best_end_;
  int64_t nodes_ = kSearchNodes;
};

}  // namespace

std::vector<PaperWork> paper_works(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                                   const Network& network) {
  std::vector<PaperWork> out;
  const auto hosts_of = [&](const std::vector<int32_t>& ranks, std::vector<int32_t>* hosts) {
    for (const int32_t rank : ranks) {
      const int32_t host = network.host(network.index(rank));
      if (std::find(hosts->begin(), hosts->end(), host) == hosts->end()) hosts->push_back(host);
    }
  };
  for (const Bundle& bundle : bundles) {
    const Task& task = tasks[static_cast<size_t>(bundle.tasks.front())];
    if (task.reduce != ReduceOp::None) continue;
    PaperWork work;
    work.bundle = static_cast<int32_t>(&bundle - bundles.data());
    work.nbytes = bundle.nbytes;
    hosts_of(task.holders, &work.senders);
    hosts_of(task.receivers, &work.receivers);
    out.push_back(std::move(work));
  }
  return out;
}

int64_t paper_makespan(const std::vector<PaperWork>& works, int32_t hosts, const PaperOrder& order) {
  std::vector<int64_t> clock(static_cast<size_t>(hosts), 0);
  int64_t end = 0;
  for (size_t i = 0; i < order.work.size(); ++i) {
    const PaperWork& work = works[static_cast<size_t>(order.work[i])];
    int64_t start = clock[static_cast<size_t>(order.sender[i])];
    for (const int32_t host : work.receivers) start = std::max(start, clock[static_cast<size_t>(host)]);
    clock[static_cast<size_t>(order.sender[i])] = start + work.nbytes;
    for (const int32_t host : work.receivers) clock[static_cast<size_t>(host)] = start + work.nbytes;
    end = std::max(end, start + work.nbytes);
  }
  return end;
}

PaperOrder solve_paper_order(const std::vector<PaperWork>& works, int32_t hosts, Balance balance,
                             uint64_t seed) {
  switch (balance) {
    case Balance::None: return natural_order(works, hosts, false);
    case Balance::Size: return natural_order(works, hosts, true);
    case Balance::Greedy: return Greedy(works, hosts, seed).run();
    case Balance::Search: return Search(works, hosts, Greedy(works, hosts, seed).run()).run();
  }
  return {};
}

}  // namespace meshcast
