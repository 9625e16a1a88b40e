#pragma once

#include <string>
#include <vector>

#include "rounds/rank_rounds.h"

namespace meshcast {

// Replays the exchanges of all ranks (by group-local rank) as NCCL would run them: a rank's groups one after
// the other; a group is over when all of its messages are; messages of a pair match in order, and none is
// buffered. Returns what is wrong first, with rank, round and peer, or the cycle of ranks that wait for one
// another; empty where all of it ends.
std::string check_exchanges(const std::vector<RankRounds>& ranks);

// Whether the events of one rank order everything that touches the same memory, whatever its streams do: no two
// accesses to one byte, one of them a write, without an order between them; nothing before the caller's earlier
// work or after its later. Returns the first mistake, or nothing. Quadratic in the steps.
std::string check_streams(const RankRounds& rounds);

}  // namespace meshcast
