#include "plan/strategies/rounds.h"

#include <algorithm>
#include <utility>

#include "common/checked.h"
#include "plan/bound/parties.h"
#include "plan/chunk_size.h"
#include "plan/stable_order.h"
#include "plan/strategies/pipeline_stops.h"
#include "plan/strategies/round_optimal.h"

namespace meshcast {
namespace {

constexpr int64_t kMostChunks = 4096;  // of a bundle
constexpr int64_t kEnough = 200;       // fewer chunks may take longer by 1/200
constexpr int32_t kMostLanes = 8;

struct Broadcast {
  Parties parties;
  std::vector<Stop> stops;
};

// Bundles begin at different stops.
std::vector<Broadcast> find_broadcasts(const Inputs& in, bool by_rank) {
  std::vector<Broadcast> out(in.bundles.size());
  for (size_t b = 0; b < out.size(); ++b) {
    out[b].parties = find_parties(in.lead(in.bundles[b]), in.network);
    out[b].stops = find_stops(out[b].parties, by_rank);
    std::vector<Stop>& stops = out[b].stops;
    const size_t begin = b * stops.size() / out.size();
    std::rotate(stops.begin(), stops.begin() + static_cast<std::ptrdiff_t>(begin), stops.end());
  }
  return out;
}

int64_t count_broadcasts(const std::vector<Broadcast>& all) {
  return std::count_if(all.begin(), all.end(), [](const Broadcast& one) { return !one.stops.empty(); });
}

// Nanoseconds of one chunk, at the slowest ports.
struct Pace {
  int64_t slot = 0;    // of a hop between stops, then its ports take the next one
  int64_t step = 0;    // of a hop inside a stop
  int64_t stride = 0;  // from one hop of a chunk inside a stop to its next
};

// `abreast`: broadcasts that take turns at a port, so that the others hide the latency of one.
Pace find_pace(const Broadcast& one, int64_t nbytes, int64_t abreast, const Network& network) {
  Pace out;
  const int32_t holder = one.parties.holders.front().ranks.front();
  for (const Stop& stop : one.stops) {
    const Network::Link outside = network.link(holder, stop.front());
    out.slot = std::max(out.slot, transfer_ns(nbytes, network.port_rate(outside.in)));
    if (stop.size() == 1) continue;
    const Network::Link inside = network.link(stop[0], stop[1]);
    out.step = std::max(out.step, transfer_ns(nbytes, network.port_rate(inside.in)));
  }
  // A chunk is forwarded once it has arrived: the other broadcasts hide the latency until then.
  out.slot = std::max(out.slot, ceil_div(out.slot + network.latency_ns(), abreast));
  out.step = std::max(out.step, ceil_div(out.step + network.latency_ns(), abreast));
  out.stride = out.step * abreast;
  return out;
}

// The arrival of a chunk at a stop.
struct Arrival {
  int32_t at = 0;     // stop
  int32_t from = -1;  // stop that sends it; -1: a holder
  int32_t turn = 0;   // chunks that came to the stop before
  int64_t sent_ns = 0;
  int64_t inside_ns = 0;  // the start of its round inside the stop
};
using Course = std::vector<Arrival>;  // of one chunk, parents first

// The course of every chunk. `place` of `abreast`: the first of this bundle's broadcasts among those that take
// turns.
std::vector<Course> find_courses(const std::vector<Stop>& stops, int32_t chunks, int32_t lanes, int64_t place,
                                 int64_t abreast, const Pace& pace) {
  std::vector<Course> out(static_cast<size_t>(chunks));
  const RoundOptimal broadcast(static_cast<int32_t>(stops.size()) + 1);
  std::vector<std::vector<RoundOptimal::Send>> sends;  // by lane
  for (int32_t lane = 0; lane < std::min(lanes, chunks); ++lane)
    sends.push_back(broadcast.sends((chunks - lane + lanes - 1) / lanes));
  for (Course& course : out) course.reserve(stops.size());
  // Chunks that wait until their group is whole; they go round together.
  std::vector<std::vector<std::pair<int32_t, size_t>>> group(stops.size());  // (chunk, index in its course)
  std::vector<int32_t> arrived(stops.size(), 0);
  std::vector<int64_t> free_ns(stops.size(), 0);
  const auto take = [&](const RoundOptimal::Send& send, int32_t lane) {
    const int64_t slot = send.round * abreast + place + lane;
    const int32_t chunk = send.block * lanes + lane;
    const auto at = static_cast<size_t>(send.to - 1);
    const auto m = static_cast<int64_t>(stops[at].size());
    Course& course = out[static_cast<size_t>(chunk)];
    group[at].emplace_back(chunk, course.size());
    course.push_back({send.to - 1, send.from - 1, arrived[at]++, slot * pace.slot, 0});
    if (arrived[at] < chunks && static_cast<int64_t>(group[at].size()) < m * abreast) return;
    const int64_t begin_ns = std::max(free_ns[at], (slot + abreast) * pace.slot);
    for (size_t i = 0; i < group[at].size(); ++i) {
      const auto& [waiting, index] = group[at][i];
      const int64_t row = static_cast<int64_t>(i) / m;
      out[static_cast<size_t>(waiting)][index].inside_ns = begin_ns + row * pace.step;
    }
    free_ns[at] = begin_ns + (m - 1) * pace.stride;
    group[at].clear();
  };
  // By slot: in every round the lanes in turn.
  std::vector<size_t> next(sends.size(), 0);
  bool more = !sends.empty();
  for (int32_t round = 0; more; ++round) {
    more = false;
    for (size_t lane = 0; lane < sends.size(); ++lane) {
      size_t& at = next[lane];
      for (; at < sends[lane].size() && sends[lane][at].round == round; ++at)
        take(sends[lane][at], static_cast<int32_t>(lane));
      more = more || at < sends[lane].size();
    }
  }
  return out;
}

// The route of chunk number `turn` of the bundle. `arrived`: scratch space for one edge of each stop; `starts`
// gets the time of each edge.
Route find_way(const Broadcast& one, const Course& course, size_t bundle, size_t turn, const Pace& pace,
               std::vector<int32_t>* arrived, std::vector<int64_t>* starts) {
  Route out;
  // Phase 1: hosts that hold the chunk.
  const std::vector<Party>& holders = one.parties.holders;
  for (size_t p = 0; p < one.parties.receivers.size(); ++p) {
    if (one.parties.remote(p)) continue;
    const Party& here = holders[static_cast<size_t>(one.parties.holder_party[p])];
    go_round(one.parties.receivers[p].ranks, pick(here.ranks, turn), -1, &out);
  }
  for (size_t i = 0; i < out.size(); ++i) starts->push_back(static_cast<int64_t>(turn + i) * pace.step);
  // Phase 2: from stop to stop.
  const size_t first = out.size();
  arrived->assign(one.stops.size(), -1);
  for (const Arrival& arrival : course) {
    const int32_t parent = arrival.from < 0 ? -1 : (*arrived)[static_cast<size_t>(arrival.from)];
    const int32_t src =
        parent >= 0 ? out[static_cast<size_t>(parent)].dst : pick(holders[turn % holders.size()].ranks, turn);
    (*arrived)[static_cast<size_t>(arrival.at)] = static_cast<int32_t>(out.size());
    const Stop& stop = one.stops[static_cast<size_t>(arrival.at)];
    out.push_back({src, pick(stop, bundle + static_cast<size_t>(arrival.turn)), parent});
    starts->push_back(arrival.sent_ns);
  }
  // Phase 3: inside.
  for (size_t i = 0; i < course.size(); ++i) {
    const auto entry = static_cast<int32_t>(first + i);
    const size_t before = out.size();
    go_round(one.stops[static_cast<size_t>(course[i].at)], out[first + i].dst, entry, &out);
    for (size_t step = 0; before + step < out.size(); ++step)
      starts->push_back(course[i].inside_ns + static_cast<int64_t>(step) * pace.stride);
  }
  return out;
}

// Sorts the hops by time, the order that ports are to keep.
void put_in_time_order(const std::vector<int64_t>& starts, std::vector<Hop>* hops) {
  if (std::is_sorted(starts.begin(), starts.end())) return;
  const std::vector<int32_t> order = stable_order(starts);
  std::vector<int32_t> place(hops->size());
  std::vector<Hop> out;
  out.reserve(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    place[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
    out.push_back((*hops)[static_cast<size_t>(order[i])]);
    // The hop that brings a chunk is earlier, so its place is known.
    if (out.back().after >= 0) out.back().after = place[static_cast<size_t>(out.back().after)];
  }
  *hops = std::move(out);
}

}  // namespace

RoundsCost rounds_cost(const Inputs& in, bool by_rank, int64_t given) {
  const std::vector<Broadcast> all = find_broadcasts(in, by_rank);
  const int64_t several = count_broadcasts(all);
  RoundsCost out;
  int64_t hops = 0;     // of one chunk of every bundle
  size_t longest = 0;   // index of the one with most stops
  int64_t largest = 0;  // bundle, bytes
  for (size_t b = 0; b < all.size(); ++b) {
    for (const Party& party : all[b].parties.receivers) hops += static_cast<int64_t>(party.ranks.size());
    if (all[b].stops.size() > all[longest].stops.size()) longest = b;
    largest = std::max(largest, in.bundles[b].nbytes);
  }
  const Broadcast& one = all[longest];
  if (one.stops.empty()) return out;
  int64_t depth = 0, m = 1;
  while ((int64_t{1} << depth) <= static_cast<int64_t>(one.stops.size())) ++depth;
  for (const Stop& stop : one.stops) m = std::max(m, static_cast<int64_t>(stop.size()));
  const int64_t most = std::min({kMostChunks, (kMaxHops - 1) / hops, largest / kSmallestChunk});
  // Powers of two and three halves of them: most shapes can be cut into exactly as many, and most groups are
  // whole.
  std::vector<int64_t> counts;
  for (int64_t power = 2; power <= most; power *= 2) {
    counts.push_back(power);
    if (power / 2 * 3 <= most) counts.push_back(power / 2 * 3);
  }
  if (given > 0) counts = {given};
  std::vector<RoundsCost> tried;
  for (const int64_t chunks : counts) {
    for (int32_t lanes = 1; lanes <= kMostLanes; ++lanes) {
      const int64_t abreast = lanes * several;
      const Pace pace = find_pace(one, ceil_div(largest, chunks), abreast, in.network);
      const int64_t filled = (depth + m) * abreast * pace.slot;
      const int64_t between = (chunks * several + depth * abreast) * pace.slot;
      const int64_t inside = ceil_div(chunks * several, m) * (m - 1) * pace.step;
      tried.push_back({{by_rank, lanes},
                       chunks,
                       std::max(between + m * pace.stride, m > 1 ? filled + inside : 0),
                       one.stops.size()});
    }
  }
  int64_t least = INT64_MAX;
  for (const RoundsCost& each : tried) least = std::min(least, each.time_ns);
  for (const RoundsCost& each : tried)
    if (each.time_ns - least <= least / kEnough) return each;
  return out;
}

Draft draft_rounds(const Inputs& in, RoundsStyle style) {
  Drafter drafter(in.tasks, in.problems, in.network);
  const std::vector<Broadcast> all = find_broadcasts(in, style.by_rank);
  const int64_t abreast = std::max<int64_t>(1, count_broadcasts(all)) * style.lanes;
  std::vector<int32_t> arrived;
  std::vector<int64_t> starts;
  int64_t most = 0, hops = 0, place = 0;
  for (const Bundle& bundle : in.bundles)
    most += (bundle.nbytes / in.chunk_bytes + 1) * static_cast<int64_t>(in.lead(bundle).receivers.size());
  drafter.reserve(most);
  starts.reserve(static_cast<size_t>(std::min(most, kMaxHops)));
  for (size_t b = 0; b < all.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    const int32_t count = chunks.last - chunks.first;
    hops += count * static_cast<int64_t>(in.lead(bundle).receivers.size());
    if (hops > kMaxHops) return {};
    const Pace pace = find_pace(all[b], drafter.chunk_bytes(chunks.first), abreast, in.network);
    std::vector<Course> courses(static_cast<size_t>(count));
    if (!all[b].stops.empty()) {
      courses = find_courses(all[b].stops, count, style.lanes, place, abreast, pace);
      place += style.lanes;
    }
    for (int32_t c = 0; c < count; ++c) {
      const auto turn = static_cast<size_t>(c);
      drafter.send(chunks.first + c, find_way(all[b], courses[turn], b, turn, pace, &arrived, &starts));
    }
  }
  Draft out = drafter.take();
  put_in_time_order(starts, &out.hops);
  return out;
}

}  // namespace meshcast
