#include "plan/staging.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "plan/draft.h"
#include "plan/packing.h"

namespace meshcast {
namespace {

// Values that a rank keeps to pass on: the most at a time if all hops are done one after the other as planned,
// and the largest of them.
struct Carried {
  int32_t now = 0;
  int32_t most = 0;
  int64_t largest = 0;
  int64_t nbytes = 0;  // of all
};

std::unordered_map<int32_t, Carried> carried_by_rank(const std::vector<Chunk>& chunks,
                                                     const std::vector<Hop>& hops,
                                                     const std::vector<char>& is_carried) {
  // As in run/program.cpp and rounds/round_table.cpp: a value is held from the hop that brings it to the last
  // one that passes it on, in plan order.
  std::vector<int32_t> last_use(hops.size(), -1);  // the last hop that passes it on
  for (size_t i = 0; i < hops.size(); ++i) {
    if (hops[i].after >= 0) last_use[static_cast<size_t>(hops[i].after)] = static_cast<int32_t>(i);
  }
  std::unordered_map<int32_t, Carried> out;
  for (size_t i = 0; i < hops.size(); ++i) {
    const Hop& hop = hops[i];
    const auto before = static_cast<size_t>(std::max(hop.after, 0));
    if (hop.after >= 0 && is_carried[before] && last_use[before] == static_cast<int32_t>(i)) --out[hop.src].now;
    if (!is_carried[i]) continue;
    Carried& carried = out[hop.dst];
    carried.most = std::max(carried.most, ++carried.now);
    const int64_t nbytes = chunks[static_cast<size_t>(hop.chunk)].nbytes;
    carried.largest = std::max(carried.largest, nbytes);
    carried.nbytes += nbytes;
  }
  return out;
}

// The largest messages of one peer and direction, descending.
using Largest = std::array<int64_t, kMessageWindow + 1>;

void insert(int64_t nbytes, Largest* largest) {
  for (int64_t& place : *largest)
    if (nbytes > place) std::swap(nbytes, place);
}

std::unordered_map<int32_t, int64_t> staging_by_rank(const std::vector<Problem>& problems,
                                                     const std::vector<Task>& tasks,
                                                     const std::vector<ChunkPiece>& pieces,
                                                     const std::vector<Chunk>& chunks,
                                                     const std::vector<Hop>& hops) {
  const Packing source(problems, &Problem::src);
  const Packing destination(problems, &Problem::dst);
  std::unordered_map<uint64_t, Largest> out, in;  // by (rank, peer)
  const auto key = [](int32_t rank, int32_t peer) {
    return (static_cast<uint64_t>(rank) << 32) | static_cast<uint32_t>(peer);
  };
  const std::vector<char> is_carried = carried_hops(tasks, pieces, chunks, hops);
  for (size_t i = 0; i < hops.size(); ++i) {
    const Hop& hop = hops[i];
    const Chunk& chunk = chunks[static_cast<size_t>(hop.chunk)];
    const bool sends_carried = hop.after >= 0 && is_carried[static_cast<size_t>(hop.after)];
    if (!sends_carried && (hop.after < 0 ? source : destination).packs(pieces, chunk, hop.src))
      insert(chunk.nbytes, &out.try_emplace(key(hop.src, hop.dst), Largest{}).first->second);
    if (!is_carried[i] && (hop.reduce != ReduceOp::None || destination.packs(pieces, chunk, hop.dst)))
      insert(chunk.nbytes, &in.try_emplace(key(hop.dst, hop.src), Largest{}).first->second);
  }
  std::unordered_map<int32_t, int64_t> total;
  for (const auto* side : {&out, &in}) {
    for (const auto& [pair, largest] : *side) {
      int64_t& bytes = total[static_cast<int32_t>(pair >> 32)];
      // A window of messages is posted; receiving has one more, which is unpacked meanwhile.
      for (size_t i = 0; i < largest.size() - (side == &out); ++i) bytes += largest[i];
    }
  }
  for (const auto& [rank, carried] : carried_by_rank(chunks, hops, is_carried))
    total[rank] += std::min((carried.most + kMessageWindow) * carried.largest, carried.nbytes);
  return total;
}

}  // namespace

std::vector<char> carried_hops(const std::vector<Task>& tasks, const std::vector<ChunkPiece>& pieces,
                               const std::vector<Chunk>& chunks, const std::vector<Hop>& hops) {
  std::vector<char> out(hops.size(), 0);
  for (size_t i = 0; i < hops.size(); ++i) {
    if (hops[i].reduce == ReduceOp::None) continue;
    const Chunk& chunk = chunks[static_cast<size_t>(hops[i].chunk)];
    const Task& task = tasks[static_cast<size_t>(pieces[static_cast<size_t>(chunk.piece_begin)].task)];
    out[i] =
        !hops[i].last_reduce || !std::binary_search(task.receivers.begin(), task.receivers.end(), hops[i].dst);
  }
  return out;
}

std::vector<int64_t> peak_staging(const Plan& plan) {
  const auto by_rank = staging_by_rank(plan.problems, plan.tasks, plan.pieces, plan.chunks, plan.hops);
  std::vector<int64_t> out;
  out.reserve(plan.ranks.size());
  for (const int32_t rank : plan.ranks) {
    const auto found = by_rank.find(rank);
    out.push_back(found == by_rank.end() ? 0 : found->second);
  }
  return out;
}

int64_t peak_staging(const std::vector<Problem>& problems, const std::vector<Task>& tasks, const Draft& draft) {
  int64_t most = 0;
  for (const auto& [rank, bytes] : staging_by_rank(problems, tasks, draft.pieces, draft.chunks, draft.hops))
    most = std::max(most, bytes);
  return most;
}

}  // namespace meshcast
