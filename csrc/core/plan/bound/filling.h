#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace meshcast {

// What no plan beats whose chunks are as large as those of this one, nanoseconds. At least its lower bound.
//
// Take one bundle: b bytes that n hosts get and do not hold, in chunks of c bytes or more, over NICs that send
// at most s bytes/s. A host passes on only what has arrived: a message keeps its out port for c / s, and its
// receiver sends no sooner than that and the latency after it has begun. So at any time no more messages have
// begun than where every host, from then on, sends over all its NICs without a break, and every message finds a
// host that has none yet. Let t be when the n-th message begins there. Some host begins to take in no sooner
// than t. From then on it takes in all b bytes, and the last one has the latency still before it.
//
// And take all bundles that one host gets and does not hold. Its ranks cannot copy before the host has a whole
// chunk, which takes a hop and its latency. Until then only its NICs are busy.
int64_t filling_bound_ns(const Plan& plan);

// The t of above. holding: ports of the hosts that hold the bundle. ports: of each of the n other hosts, at
// most. hold_ns: c / s, at least 1.
int64_t last_begin_ns(int64_t holding, int64_t hosts, int64_t ports, int64_t hold_ns, int64_t latency_ns);

}  // namespace meshcast
