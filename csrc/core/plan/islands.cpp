#include "plan/islands.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "plan/disjoint_sets.h"

namespace meshcast {
namespace {

// Numbers values in the order in which they first occur.
class Numbering {
 public:
  // The number of `value`, and whether it is new.
  std::pair<int32_t, bool> of(int32_t value) {
    const auto [it, fresh] = numbers_.try_emplace(value, static_cast<int32_t>(numbers_.size()));
    return {it->second, fresh};
  }

 private:
  std::unordered_map<int32_t, int32_t> numbers_;
};

// Example. Ranks 0, 1 | 2, 3 | 4, 5 | 6, 7 on four hosts; 0 and 1 send a half each to 2 and 3, and 4 and 5 to 6
// and 7. Both islands are described as: holder 0 on host 0 at NIC 0, receivers 1 and 2 on host 1, then holder 3
// on host 0, and so on. So rank 4 takes the place of 0, and a hop 0 -> 2 of the first island is 4 -> 6 in the
// second.
//
// Everything that a plan of an island depends on, with ranks, hosts and tensors numbered in their order: equal
// for islands of one kind. Fills in island->ranks.
std::vector<int64_t> describe(const std::vector<Task>& tasks, const std::vector<Problem>& problems,
                              const Topology& topology, const Network& network, Island* island) {
  std::vector<int64_t> said;
  Numbering ranks, hosts, tensors;
  const auto say_rank = [&](int32_t rank) {
    const auto [number, fresh] = ranks.of(rank);
    said.push_back(number);
    if (!fresh) return;
    island->ranks.push_back(rank);
    const int32_t at = network.host(network.index(rank));
    const Host& host = topology.hosts[static_cast<size_t>(at)];
    const auto [host_number, first] = hosts.of(at);
    const auto place = std::find(host.ranks.begin(), host.ranks.end(), rank) - host.ranks.begin();
    said.insert(said.end(), {host_number, static_cast<int64_t>(host.nic_of(static_cast<size_t>(place)))});
    if (!first) return;
    said.insert(said.end(), {host.local_rate, static_cast<int64_t>(host.nics.size())});
    for (const Nic& nic : host.nics) said.insert(said.end(), {nic.out_rate, nic.in_rate});
  };
  for (const int32_t t : island->tasks) {
    const Task& task = tasks[static_cast<size_t>(t)];
    const Problem& problem = problems[static_cast<size_t>(task.tensor)];
    said.insert(said.end(),
                {tensors.of(task.tensor).first, problem.element_bytes, static_cast<int64_t>(problem.stacked),
                 task.box.ndim, task.nbytes, static_cast<int64_t>(task.reduce),
                 static_cast<int64_t>(task.holders.size()), static_cast<int64_t>(task.receivers.size())});
    for (int d = 0; d < task.box.ndim; ++d) said.push_back(task.box.extent(d));
    for (const int32_t rank : task.holders) say_rank(rank);
    for (const int32_t rank : task.receivers) say_rank(rank);
    for (const int32_t number : task.contribution) said.push_back(number);
  }
  return said;
}

Box moved(Box box, const Box& from, const Box& to) {
  for (int d = 0; d < box.ndim; ++d) {
    box.lo[d] += to.lo[d] - from.lo[d];
    box.hi[d] += to.lo[d] - from.lo[d];
  }
  return box;
}

}  // namespace

std::vector<IslandKind> find_islands(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                                     const std::vector<Problem>& problems, const Topology& topology,
                                     const Network& network) {
  // Phase 1: find the hosts that belong together. Most problems have one island, and end here.
  DisjointSets groups(static_cast<int32_t>(topology.hosts.size()));
  const auto host_of = [&](int32_t rank) { return network.host(network.index(rank)); };
  for (const Bundle& bundle : bundles) {
    const Task& lead = tasks[static_cast<size_t>(bundle.tasks.front())];
    const int32_t first = host_of(lead.receivers.front());
    for (const RankList* ranks : {&lead.holders, &lead.receivers})
      for (const int32_t rank : *ranks) groups.link(first, host_of(rank));
  }
  std::map<int32_t, Island> by_group;
  for (size_t t = 0; t < tasks.size(); ++t)
    by_group[groups.find(host_of(tasks[t].receivers.front()))].tasks.push_back(static_cast<int32_t>(t));
  if (by_group.size() < 2) return {};
  // Phase 2: find the islands of one kind, in the order of their first tasks. Descriptions are compared in full
  // and not by a hash: a collision would move the wrong bytes.
  std::map<int32_t, Island> by_task;
  for (auto& [_, island] : by_group) {
    const int32_t first = island.tasks.front();
    by_task.emplace(first, std::move(island));
  }
  std::vector<IslandKind> kinds;
  std::map<std::vector<int64_t>, size_t> known;
  for (auto& [_, island] : by_task) {
    auto said = describe(tasks, problems, topology, network, &island);
    const auto [it, fresh] = known.try_emplace(std::move(said), kinds.size());
    if (fresh) kinds.emplace_back();
    kinds[it->second].push_back(std::move(island));
  }
  if (kinds.size() == by_task.size()) return {};
  return kinds;
}

std::vector<Task> tasks_of(const Island& island, const std::vector<Task>& tasks) {
  std::vector<Task> out;
  out.reserve(island.tasks.size());
  for (const int32_t t : island.tasks) out.push_back(tasks[static_cast<size_t>(t)]);
  return out;
}

Draft join_islands(const std::vector<IslandKind>& kinds, const std::vector<Plan>& plans,
                   const std::vector<Task>& tasks) {
  Draft out;
  std::vector<std::pair<int64_t, int32_t>> order;  // start, index in `hops`
  std::vector<Hop> hops;
  for (size_t k = 0; k < kinds.size(); ++k) {
    const Plan& plan = plans[k];
    const Island& model = kinds[k].front();
    std::unordered_map<int32_t, size_t> place;  // of a rank of the model
    for (size_t r = 0; r < model.ranks.size(); ++r) place.emplace(model.ranks[r], r);
    for (const Island& island : kinds[k]) {
      const auto first_piece = static_cast<int32_t>(out.pieces.size());
      const auto first_chunk = static_cast<int32_t>(out.chunks.size());
      const auto first_hop = static_cast<int32_t>(hops.size());
      for (const ChunkPiece& piece : plan.pieces) {
        const int32_t its = island.tasks[static_cast<size_t>(piece.task)];
        const Task& task = tasks[static_cast<size_t>(its)];
        const Box& from = tasks[static_cast<size_t>(model.tasks[static_cast<size_t>(piece.task)])].box;
        out.pieces.push_back({task.tensor, its, moved(piece.box, from, task.box)});
      }
      for (const Chunk& chunk : plan.chunks)
        out.chunks.push_back({chunk.piece_begin + first_piece, chunk.piece_end + first_piece, chunk.nbytes});
      for (size_t i = 0; i < plan.hops.size(); ++i) {
        Hop hop = plan.hops[i];
        hop.src = island.ranks[place.at(hop.src)];
        hop.dst = island.ranks[place.at(hop.dst)];
        hop.chunk += first_chunk;
        if (hop.after >= 0) hop.after += first_hop;
        order.emplace_back(plan.times[i].start_ns, static_cast<int32_t>(hops.size()));
        hops.push_back(hop);
      }
    }
  }
  // A hop starts after the one that it waits for, so this order is also topological.
  std::sort(order.begin(), order.end());
  std::vector<int32_t> index(hops.size());
  for (size_t i = 0; i < order.size(); ++i)
    index[static_cast<size_t>(order[i].second)] = static_cast<int32_t>(i);
  out.hops.reserve(hops.size());
  for (const auto& [_, i] : order) {
    Hop hop = hops[static_cast<size_t>(i)];
    if (hop.after >= 0) hop.after = index[static_cast<size_t>(hop.after)];
    out.hops.push_back(hop);
  }
  return out;
}

}  // namespace meshcast
