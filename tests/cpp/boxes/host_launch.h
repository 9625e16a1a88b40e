#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "boxes/box_ops.h"
#include "boxes/launch_plan.h"

// Runs launches on the host: every thread of every block, with an eye on each access.

namespace meshcast::cuda::testing {

// A stretch of memory that counts how often each byte is read and written.
struct Arena {
  std::vector<std::byte> bytes;
  std::vector<uint8_t> reads;
  std::vector<uint8_t> writes;

  // Aligned like memory of a GPU, so that offsets decide about alignment.
  explicit Arena(size_t size) : bytes(size + 256), reads(size + 256), writes(size + 256) {}
  std::byte* begin() {
    const auto at = reinterpret_cast<uintptr_t>(bytes.data());
    return bytes.data() + (256 - at % 256) % 256;
  }
  bool holds(const std::byte* at, size_t n) const {
    return at >= bytes.data() && at + n <= bytes.data() + bytes.size();
  }
  size_t index(const std::byte* at) const { return static_cast<size_t>(at - bytes.data()); }
};

class WatchedMemory {
 public:
  WatchedMemory(std::vector<Arena>* arenas, std::set<std::string>* faults) : arenas_(arenas), faults_(faults) {}

  template <typename T>
  T load(const std::byte* from) const {
    T out{};
    if (Arena* arena = find(from, sizeof(T))) {
      for (size_t i = 0; i < sizeof(T); ++i) ++arena->reads[arena->index(from) + i];
      std::memcpy(&out, from, sizeof(T));
    }
    return out;
  }
  template <typename T>
  void store(std::byte* to, const T& value) const {
    if (Arena* arena = find(to, sizeof(T))) {
      for (size_t i = 0; i < sizeof(T); ++i) ++arena->writes[arena->index(to) + i];
      std::memcpy(to, &value, sizeof(T));
    }
  }

 private:
  Arena* find(const std::byte* at, size_t n) const {
    if (reinterpret_cast<uintptr_t>(at) % n != 0) faults_->insert("an access is not aligned to its size");
    for (Arena& arena : *arenas_) {
      if (arena.holds(at, n)) return &arena;
    }
    faults_->insert("an access lies outside every buffer");
    return nullptr;
  }

  std::vector<Arena>* arenas_;
  std::set<std::string>* faults_;
};

// What a launcher does, with loops for the hardware. Gives the number of launches.
template <class Table, class Op, class Memory>
int launch_on_host(std::span<const BoxPair> pairs, const Op& op, const Memory& memory, uint32_t most_blocks,
                   const Limits& limits) {
  static Table table;
  int launches = 0;
  const Units units{Op::kFromBytes, Op::kToBytes, Op::kPiece};
  fill_tables(
      pairs, units, &table, [](const CopyNest&) { return true; },
      [&](const Table& full) {
        ++launches;
        const uint32_t blocks = std::min(full.tiles, most_blocks);
        for (uint32_t block = 0; block < blocks; ++block) {
          for (uint32_t thread = 0; thread < kThreads; ++thread)
            run_thread(op, memory, full, block, blocks, thread);
        }
      },
      limits);
  return launches;
}

// Views of equal extents over regions of random order and margins; either side may be packed.
struct RandomPair {
  StridedView from;  // data: offset from the start of the source's memory
  StridedView to;
  size_t from_size = 0;
  size_t to_size = 0;
};

RandomPair random_pair(std::mt19937& rng, int64_t from_bytes, int64_t to_bytes, bool aligned);

// Addresses of the elements in row-major order.
std::vector<std::byte*> element_addresses(const StridedView& view);

}  // namespace meshcast::cuda::testing
