#pragma once

#include <random>
#include <set>
#include <string>
#include <vector>

#include "boxes/host_launch.h"

namespace meshcast::cuda::testing {

// Several pairs over one source arena and one destination arena, with gaps that nothing may touch.
struct Batch {
  std::vector<BoxPair> pairs;
  std::vector<Arena> arenas;  // source, destination
  Arena& source() { return arenas[0]; }
  Arena& destination() { return arenas[1]; }
};

Batch random_batch(std::mt19937& rng, size_t boxes, int64_t from_bytes, int64_t to_bytes, bool aligned);

// How often each byte of an arena belongs to a box: what may be accessed, and how often.
std::vector<uint8_t> owned_bytes(const Arena& arena, const std::vector<BoxPair>& pairs, bool from);

// Small limits now and then, so that boxes are divided and threads take several pieces.
Limits random_limits(std::mt19937& rng);

// Launches the batch with tables of either size and any number of blocks. Gives what memory complained about.
template <class Op>
std::set<std::string> run_batch(std::mt19937& rng, Batch* batch, const Op& op) {
  std::set<std::string> faults;
  const WatchedMemory memory(&batch->arenas, &faults);
  const uint32_t most_blocks = rng() % 2 == 0 ? 1'000'000 : 1 + rng() % 3;
  const Limits limits = random_limits(rng);
  if (rng() % 2 == 0) {
    launch_on_host<SmallTable>(batch->pairs, op, memory, most_blocks, limits);
  } else {
    launch_on_host<LargeTable>(batch->pairs, op, memory, most_blocks, limits);
  }
  return faults;
}

}  // namespace meshcast::cuda::testing
