#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "memory/digest.h"
#include "run/program.h"

namespace meshcast {

// Digests of what a run reads and writes on this rank, taken piece by piece right after each is copied, while
// it is in the core's cache. A separate pass would read it from memory again. Thread-safe.
class RunDigests {
 public:
  // nans: by tensor; empty if no digest is taken.
  explicit RunDigests(std::vector<DigestNans> nans) : nans_(std::move(nans)), sums_(nans_.size()) {}

  bool taken() const { return !nans_.empty(); }

  // Adds the elements with bytes [begin, end) of the packed form of `view`, the memory of `part`, if it counts.
  void add(const Program& program, const Part& part, const StridedView& view, int64_t begin, int64_t end);

  // The digest of this rank's whole shard, once the run has ended without an error. None if not all of it is
  // counted.
  std::optional<uint64_t> total(const Program& program, size_t tensor) const;

 private:
  struct Halves {
    std::atomic<uint32_t> lower{0};
    std::atomic<uint32_t> upper{0};
  };

  const std::vector<DigestNans> nans_;
  std::vector<Halves> sums_;  // by tensor
};

}  // namespace meshcast
