#include "plan/chunk_size.h"

#include <algorithm>

#include "plan/staging.h"

namespace meshcast {
namespace {

constexpr int64_t kLargestChunk = 4096 * 1024;
constexpr int64_t kFinestChunk = 8 * 1024;

int64_t fastest_nic(const Network& network) {
  int64_t rate = 0;
  for (int32_t n = 0; n < network.nic_count(); ++n)
    rate = std::max(rate, network.port_rate(network.nic_out(n)));
  return rate;
}

}  // namespace

int64_t choose_chunk_bytes(int64_t bound_ns, const Network& network) {
  const auto bytes = static_cast<__int128>(bound_ns) * fastest_nic(network) / 1000000000 / 128;
  return static_cast<int64_t>(std::clamp<__int128>(bytes, kSmallestChunk, kLargestChunk));
}

int64_t finest_chunk_bytes(const Network& network) {
  return std::clamp(fastest_nic(network) / 1000, kFinestChunk, kSmallestChunk);
}

int64_t count_hops(int64_t chunk_bytes, const std::vector<Task>& tasks, const std::vector<Bundle>& bundles) {
  int64_t out = 0;
  for (const Bundle& bundle : bundles) {
    const Task& task = tasks[static_cast<size_t>(bundle.tasks.front())];
    out += (bundle.nbytes / chunk_bytes + 1) *
           static_cast<int64_t>(task.receivers.size() + task.contribution.size());
  }
  return out;
}

int64_t fit_chunk_bytes(int64_t chunk_bytes, const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                        int64_t most) {
  while (chunk_bytes < (int64_t{1} << 60) && count_hops(chunk_bytes, tasks, bundles) > most) chunk_bytes *= 2;
  return chunk_bytes;
}

int64_t most_hops(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles) {
  const int64_t fewest = count_hops(INT64_MAX, tasks, bundles);
  return fewest <= kMostHops ? kMostHops : std::min(fewest + fewest / 2, kMaxHops / 4);
}

int64_t shrink_chunks(const Inputs& in, const std::vector<Chunk>& chunks, int64_t staging) {
  if (staging <= kStagingGoal) return 0;
  int64_t largest = 0;
  for (const Chunk& chunk : chunks) largest = std::max(largest, chunk.nbytes);
  largest = std::min(in.chunk_bytes, largest);
  // Staging grows with the size of chunks, except on ranks where trees of other chunks meet, which get some
  // room.
  const auto fitting = static_cast<int64_t>(static_cast<__int128>(largest) * kStagingGoal / staging / 8 * 7);
  const int64_t chunk =
      fit_chunk_bytes(std::max(fitting, kSmallestChunk), in.tasks, in.bundles, most_hops(in.tasks, in.bundles));
  return chunk < largest ? chunk : 0;
}

}  // namespace meshcast
