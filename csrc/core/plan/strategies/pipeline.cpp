#include "plan/strategies/pipeline.h"

#include <algorithm>
#include <utility>

#include "common/checked.h"
#include "plan/bound/parties.h"
#include "plan/strategies/pipeline_stops.h"

namespace meshcast {
namespace {

// Stop `at` of a tree gets the chunk from stop `from` (-1: from a holder) in step `lag` after the chunk leaves
// its holder.
struct Leg {
  int32_t at = 0;
  int32_t from = -1;
  int64_t lag = 0;
};
using Tree = std::vector<Leg>;  // parents first

struct Pipe {
  Parties parties;
  std::vector<Stop> stops;
  std::vector<Tree> trees;  // chunks take them in turn
};

// Chains of equal length, one for each host that can begin one.
Tree chains(int32_t n, int32_t sources) {
  const auto length = static_cast<int32_t>(ceil_div(n, sources));
  Tree out;
  for (int32_t i = 0; i < n; ++i) out.push_back({i, i % length == 0 ? -1 : i - 1, i % length});
  return out;
}

// The in-order binary tree of Sanders, Speck and Traeff ("Two-tree algorithms for full bandwidth broadcast,
// reduction and scan", 2009): odd numbers, from 1, are leaves; the lowest bit of a number is its height.
int32_t parent_in_order(int32_t number, int32_t n) {
  const int32_t bit = number & -number;
  const int32_t parent = (number ^ bit) | (bit << 1);
  return parent <= n ? parent : number ^ bit;  // 0 above the root
}

// Two trees over the same stops: a stop with two children in one of them is a leaf in the other. If chunks take
// both in turn, every stop sends as much as it receives, and the depth is logarithmic.
std::vector<Tree> two_trees(int32_t n) {
  std::vector<std::vector<int32_t>> children(static_cast<size_t>(n) + 1);
  for (int32_t number = 1; number <= n; ++number)
    children[static_cast<size_t>(parent_in_order(number, n))].push_back(number);
  Tree first;
  std::vector<std::pair<int32_t, int32_t>> open;  // (number, leg that brings the chunk there)
  const auto visit = [&](int32_t number, int32_t from, int64_t lag) {
    first.push_back({number - 1, from, lag});
    open.emplace_back(number, static_cast<int32_t>(first.size()) - 1);
  };
  visit(children[0].front(), -1, 0);
  for (size_t k = 0; k < open.size(); ++k) {
    const auto [number, leg] = open[k];
    int64_t lag = first[static_cast<size_t>(leg)].lag;
    for (const int32_t child : children[static_cast<size_t>(number)]) visit(child, leg, ++lag);
  }
  for (Leg& leg : first)
    if (leg.from >= 0) leg.from = first[static_cast<size_t>(leg.from)].at;
  // The other tree: mirrored if n is even, shifted by one if it is odd.
  Tree second = first;
  const auto moved = [n](int32_t at) { return n % 2 == 0 ? n - 1 - at : (at + 1) % n; };
  for (Leg& leg : second) {
    leg.at = moved(leg.at);
    if (leg.from >= 0) leg.from = moved(leg.from);
  }
  return {first, second};
}

// Bundles begin at different stops, so that the ends of their chains, which pass nothing on, are spread.
std::vector<Pipe> find_pipes(const Inputs& in, PipelineStyle style) {
  std::vector<Pipe> out(in.bundles.size());
  for (size_t b = 0; b < out.size(); ++b) {
    Pipe& pipe = out[b];
    pipe.parties = find_parties(in.lead(in.bundles[b]), in.network);
    pipe.stops = find_stops(pipe.parties, style.by_rank);
    const auto n = static_cast<int32_t>(pipe.stops.size());
    if (n == 0) continue;
    const size_t begin = b * pipe.stops.size() / out.size();
    std::rotate(pipe.stops.begin(), pipe.stops.begin() + static_cast<std::ptrdiff_t>(begin), pipe.stops.end());
    pipe.trees = style.two_trees
                     ? two_trees(n)
                     : std::vector<Tree>{chains(n, static_cast<int32_t>(pipe.parties.holders.size()))};
  }
  return out;
}

// Steps for which every port is busy with one chunk of each bundle.
int64_t steps_of_a_round(const std::vector<Pipe>& pipes) {
  size_t legs = 0, most = 1;
  for (const Pipe& pipe : pipes) {
    legs += pipe.stops.size();
    most = std::max(most, pipe.stops.size());
  }
  return static_cast<int64_t>(std::max<size_t>(1, legs / most));
}

// The route of chunk number `turn` of the bundle. `arrived`: scratch space for one edge of each stop.
Route find_route(const Pipe& pipe, size_t bundle, size_t turn, std::vector<int32_t>* arrived) {
  Route out;
  // Phase 1: hosts that hold the chunk.
  for (size_t p = 0; p < pipe.parties.receivers.size(); ++p) {
    if (pipe.parties.remote(p)) continue;
    const Party& here = pipe.parties.holders[static_cast<size_t>(pipe.parties.holder_party[p])];
    go_round(pipe.parties.receivers[p].ranks, pick(here.ranks, turn), -1, &out);
  }
  if (pipe.stops.empty()) return out;
  // Phase 2: the others. The rank at which a chunk enters passes it on to the next stops. It differs from chunk
  // to chunk, since the last rank of a round passes nothing on.
  const Tree& tree = pipe.trees[turn % pipe.trees.size()];
  size_t sources = turn;  // holders take turns, too
  arrived->assign(pipe.stops.size(), -1);
  for (const Leg& leg : tree) {
    const int32_t parent = leg.from < 0 ? -1 : (*arrived)[static_cast<size_t>(leg.from)];
    const std::vector<Party>& holders = pipe.parties.holders;
    const int32_t src = parent >= 0 ? out[static_cast<size_t>(parent)].dst
                                    : pick(holders[sources++ % holders.size()].ranks, turn);
    (*arrived)[static_cast<size_t>(leg.at)] = static_cast<int32_t>(out.size());
    out.push_back({src, pick(pipe.stops[static_cast<size_t>(leg.at)], bundle + turn), parent});
  }
  // Phase 3: inside.
  for (const Leg& leg : tree) {
    const int32_t entry = (*arrived)[static_cast<size_t>(leg.at)];
    go_round(pipe.stops[static_cast<size_t>(leg.at)], out[static_cast<size_t>(entry)].dst, entry, &out);
  }
  return out;
}

}  // namespace

PipelineCost pipeline_cost(const Inputs& in, PipelineStyle style) {
  const std::vector<Pipe> pipes = find_pipes(in, style);
  PipelineCost out;
  for (const Pipe& pipe : pipes) {
    int64_t longest = 0;
    for (const Party& party : pipe.parties.receivers) out.hops += static_cast<int64_t>(party.ranks.size());
    for (const Stop& stop : pipe.stops) longest = std::max(longest, static_cast<int64_t>(stop.size()));
    for (const Tree& tree : pipe.trees)
      for (const Leg& leg : tree) out.fill = std::max(out.fill, leg.lag + longest);
  }
  out.fill = std::max<int64_t>(1, out.fill / steps_of_a_round(pipes));
  return out;
}

Draft draft_pipeline(const Inputs& in, PipelineStyle style) {
  Drafter drafter(in.tasks, in.problems, in.network);
  const std::vector<Pipe> pipes = find_pipes(in, style);
  std::vector<int32_t> arrived;
  int64_t hops = 0;
  for (size_t b = 0; b < pipes.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    hops += (chunks.last - chunks.first) * static_cast<int64_t>(in.lead(bundle).receivers.size());
    if (hops > kMaxHops / 2) return {};
    int64_t before = 0;
    for (int32_t c = chunks.first; c < chunks.last; ++c) {
      // In a steady stream the bundle ends at the bound.
      const auto due = static_cast<int64_t>(static_cast<__int128>(before) * in.bound_ns / bundle.nbytes);
      drafter.send(c, find_route(pipes[b], b, static_cast<size_t>(c - chunks.first), &arrived), -1, due);
      before += drafter.chunk_bytes(c);
    }
  }
  return drafter.take();
}

}  // namespace meshcast
