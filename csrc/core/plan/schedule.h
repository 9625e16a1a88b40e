#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

struct Schedule {
  std::vector<Hop> hops;       // by start time; topological
  std::vector<HopTime> times;  // parallel
  int64_t makespan_ns = 0;
};

// List scheduling: a hop may start when its chunk is there and both its ports are free. Among these hops,
// Draft::order decides first; then the work left on the two ports (most goes first), less the time at which the
// hop is due if the draft has such times; then the rest of the route, or with due times the work left on the
// port that has less. `urgency` by port (or empty) multiplies the work left, in units of kUrgency. `chunks` are
// those of the draft.
inline constexpr int32_t kUrgency = 64;
Schedule schedule(const Draft& draft, const std::vector<Chunk>& chunks, const Network& network,
                  const std::vector<int32_t>& urgency = {});

// A lower bound for any order of these hops: a port begins when the first chunk can have arrived there, is busy
// with all of its hops, and then the rest of the routes after its last hop takes its time.
int64_t least_makespan_ns(const std::vector<Hop>& hops, const std::vector<Chunk>& chunks,
                          const Network& network);

// Forward-backward improvement, as for projects with scarce resources: the hops are scheduled again from the
// end, those that finish last first, then from the start in the resulting order. Hops that were early only
// because nothing else was ready thus make room for hops that the end waits for. The result may be worse.
Schedule reschedule(const Schedule& before, const std::vector<Chunk>& chunks, const Network& network);

// Event times of hops taken in the given order on every port (from schedule(), or any other list): uses only
// hops, chunk sizes and the topology. Throws LayoutError if `after` does not come earlier or does not end at
// the hop's source.
Schedule simulate(std::vector<Hop> hops, const std::vector<Chunk>& chunks, const Network& network);

// The same hops in the order of their start. Hops that start at the same time keep their order.
Schedule sort_by_start(Schedule made);

}  // namespace meshcast
