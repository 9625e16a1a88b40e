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

// List scheduling: a hop may start when its chunk is there and both its ports are free. Among the hops that
// may, Draft::order decides first; then the work left on the two ports (most goes first), against the time
// at which the hop is due where the draft says so; then the rest of the route, or the work left on the lesser
// port where there are such times.
// `urgency` by port (or empty) multiplies the work left, in units of kUrgency. `chunks` are those of the draft.
inline constexpr int32_t kUrgency = 64;
Schedule schedule(const Draft& draft, const std::vector<Chunk>& chunks, const Network& network,
                  const std::vector<int32_t>& urgency = {});

// No schedule of these hops takes less time, in whatever order: a port begins when the first chunk can have
// come to it, is busy with all of its hops, and what comes after the last of them takes its time as well.
int64_t least_makespan_ns(const std::vector<Hop>& hops, const std::vector<Chunk>& chunks,
                          const Network& network);

// Forward-backward improvement, as for projects with scarce resources: the hops are scheduled once more from
// the end, those that finish last first, then from the start in the order this gives. What came early only
// because nothing else was ready thus makes room for what the end waits for. The result may be worse.
Schedule reschedule(const Schedule& before, const std::vector<Chunk>& chunks, const Network& network);

// Event times of hops taken in the given order on every port (what `schedule` returns, or any hand-made
// list): knows hops, chunk sizes and the topology, nothing of how they were chosen. Throws LayoutError where
// `after` does not come earlier or does not end at the hop's source.
Schedule simulate(std::vector<Hop> hops, const std::vector<Chunk>& chunks, const Network& network);

// The same hops in the order of their start. Hops that start at one moment keep theirs.
Schedule sort_by_start(Schedule made);

}  // namespace meshcast
