#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace meshcast {

// The least time, in nanoseconds, of any plan with chunks as large as those of this one. At least its lower
// bound.
//
// Take one bundle: b bytes that n hosts get and do not hold, in chunks of c bytes or more, over NICs that send
// at most s bytes/s. A host passes on only what has arrived: a message keeps its out port for c / s, and its
// receiver sends no sooner than that and the latency after it has begun. So at any time no more messages have
// begun than if every host, from then on, sent over all its NICs without a break, and every message went to a
// host that has none yet. Let t be the time at which the n-th message would begin then. Some host begins to
// take in no sooner than t. From t on it takes in all b bytes, and the last one then takes the latency.
//
// Also take all bundles that one host gets and does not hold. Its ranks cannot copy before the host has a whole
// chunk, which takes a hop and its latency. Until then only its NICs are busy.
int64_t filling_bound_ns(const Plan& plan);

// The t from above. holding: ports of the hosts that hold the bundle. hosts: n. ports: the most of any of these
// n hosts. hold_ns: c / s, at least 1.
int64_t last_begin_ns(int64_t holding, int64_t hosts, int64_t ports, int64_t hold_ns, int64_t latency_ns);

}  // namespace meshcast
