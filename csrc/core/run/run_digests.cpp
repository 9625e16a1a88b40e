#include "run/run_digests.h"

namespace meshcast {

void RunDigests::add(const Program& program, const Part& part, const StridedView& view, int64_t begin,
                     int64_t end) {
  if (!taken() || !part.counts) return;
  const auto tensor = static_cast<size_t>(part.tensor);
  const uint64_t found =
      digest_of_copied(view, begin, end, part.first, program.digests[tensor].step, nans_[tensor]);
  Halves& sums = sums_[tensor];
  sums.lower.fetch_add(static_cast<uint32_t>(found), std::memory_order_relaxed);
  sums.upper.fetch_add(static_cast<uint32_t>(found >> 32), std::memory_order_relaxed);
}

std::optional<uint64_t> RunDigests::total(const Program& program, size_t tensor) const {
  if (!taken() || !program.digests[tensor].whole) return std::nullopt;
  const Halves& sums = sums_[tensor];
  return uint64_t{sums.upper} << 32 | sums.lower;
}

}  // namespace meshcast
