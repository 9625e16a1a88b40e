#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// The size of chunks. Small ones fill a chain sooner, large ones make fewer hops; staging sets an upper limit,
// the number of hops a lower one. All sizes are bytes.

inline constexpr int64_t kSmallestChunk = 64 * 1024;
inline constexpr int64_t kMostHops = 300'000;  // see most_hops

// About what the fastest NIC sends in 1/128 of the bound: small enough that filling a chain costs little.
int64_t choose_chunk_bytes(int64_t bound_ns, const Network& network);

// The chunk that the fastest NIC sends in a millisecond, compared with which a message costs little:
// kSmallestChunk, and less if NICs are slow.
int64_t finest_chunk_bytes(const Network& network);

// Hops of all chunks if bundles are cut into chunks of the given size.
int64_t count_hops(int64_t chunk_bytes, const std::vector<Task>& tasks, const std::vector<Bundle>& bundles);

// The size itself, or the smallest doubling of it that keeps the plan within `most` hops.
int64_t fit_chunk_bytes(int64_t chunk_bytes, const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                        int64_t most);

// The most hops of a plan whose chunk size the planner chooses: kMostHops, or 3/2 of the number of (bundle,
// receiver) pairs if these alone are more.
int64_t most_hops(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles);

// Smaller chunks for a strategy with which a rank would need more staging than it should; 0 if these would not
// help.
int64_t shrink_chunks(const Inputs& in, const std::vector<Chunk>& chunks, int64_t staging);

}  // namespace meshcast
