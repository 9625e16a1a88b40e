#include <algorithm>
#include <array>
#include <iterator>

#include <fmt/format.h>

#include "support/round_check.h"

namespace meshcast {
namespace {

constexpr size_t kStreams = 3;

// How far along every stream something is known to be over.
using Clock3 = std::array<int32_t, kStreams>;

struct Access {
  size_t step = 0;
  size_t stream = 0;
  int32_t time = 0;  // on its stream
  bool write = false;
  int64_t staging = -1;  // else `part`
  int64_t nbytes = 0;
  const Part* part = nullptr;
};

// Where the elements of a part lie in a flat local tensor, ascending.
std::vector<int64_t> flat_elements(const Part& part, const BoxPlace& place) {
  std::vector<int64_t> out{part.at[0]};
  for (int d = 0; d < part.ndim; ++d) {
    const size_t before = out.size();
    for (int64_t i = 1; i < part.extent[static_cast<size_t>(d)]; ++i) {
      for (size_t e = 0; e < before; ++e) out.push_back(out[e] + i * place.step[static_cast<size_t>(d)]);
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool overlap(const Access& a, const Access& b, const std::vector<BoxPlace>& places) {
  if ((a.part == nullptr) != (b.part == nullptr)) return false;
  if (a.part == nullptr) return a.staging < b.staging + b.nbytes && b.staging < a.staging + a.nbytes;
  if (a.part->tensor != b.part->tensor || a.part->side != b.part->side) return false;
  if (a.part->place >= 0) {
    const auto mine = flat_elements(*a.part, places[static_cast<size_t>(a.part->place)]);
    const auto theirs = flat_elements(*b.part, places[static_cast<size_t>(b.part->place)]);
    std::vector<int64_t> common;
    std::set_intersection(mine.begin(), mine.end(), theirs.begin(), theirs.end(), std::back_inserter(common));
    return !common.empty();
  }
  for (int d = 0; d < a.part->ndim; ++d) {
    const auto at = static_cast<size_t>(d);
    if (a.part->at[at] >= b.part->at[at] + b.part->extent[at] ||
        b.part->at[at] >= a.part->at[at] + a.part->extent[at])
      return false;
  }
  return true;
}

class StreamCheck {
 public:
  explicit StreamCheck(const RankRounds& rounds)
      : rounds_(rounds), events_(static_cast<size_t>(rounds.events)) {}

  std::string run() {
    clocks_[0][0] = 1;  // the caller's earlier work
    for (size_t i = 0; i < rounds_.steps.size() && mistake_.empty(); ++i) step(i);
    if (!mistake_.empty()) return mistake_;
    for (const Access& access : accesses_) {
      if (clocks_[0][access.stream] < access.time)
        return fmt::format("rank {}: the caller's stream does not wait for {}", rounds_.program->rank,
                           describe(access.step));
    }
    return {};
  }

 private:
  void step(size_t i) {
    const RoundStep& step = rounds_.steps[i];
    const auto stream = static_cast<size_t>(step.stream);
    switch (step.kind) {
      case StepKind::Record: events_[static_cast<size_t>(step.event)] = clocks_[stream]; return;
      case StepKind::Wait:
        // An event that was never recorded holds nobody up.
        for (size_t s = 0; s < kStreams; ++s)
          clocks_[stream][s] = std::max(clocks_[stream][s], events_[static_cast<size_t>(step.event)][s]);
        return;
      case StepKind::Kernels:
      case StepKind::Exchange: break;
    }
    ++clocks_[stream][stream];
    if (clocks_[stream][0] < 1) {
      mistake_ =
          fmt::format("rank {}: {} does not wait for the caller's stream", rounds_.program->rank, describe(i));
      return;
    }
    now_ = {i, stream, clocks_[stream][stream]};
    for (int32_t at = step.begin; at < step.end && mistake_.empty(); ++at) {
      if (step.kind == StepKind::Kernels)
        kernel(rounds_.kernels[static_cast<size_t>(at)]);
      else
        message(rounds_.messages[static_cast<size_t>(at)]);
    }
  }

  void message(const RoundMessage& message) {
    if (message.staging >= 0)
      touch_staging(message.staging, message.nbytes, !message.send);
    else
      touch(rounds_.program->parts[static_cast<size_t>(message.part)], !message.send);
  }

  void kernel(const KernelOp& op) {
    if (op.kind == KernelKind::Copy) {
      const CopyOp& copy = rounds_.program->copies[static_cast<size_t>(op.copy)];
      touch(copy.from, false);
      touch(copy.to, true);
      return;
    }
    touch_staging(op.staging, op.nbytes, op.kind != KernelKind::Unpack);
    for (int32_t p = op.parts.begin; p < op.parts.end; ++p)
      touch(rounds_.program->parts[static_cast<size_t>(p)], op.kind == KernelKind::Unpack);
  }

  void touch_staging(int64_t offset, int64_t nbytes, bool write) {
    Access access = now_;
    access.write = write;
    access.staging = offset;
    access.nbytes = nbytes;
    if (offset + nbytes > rounds_.staging_bytes)
      mistake_ = fmt::format("rank {}: {} touches staging beyond its end", rounds_.program->rank,
                             describe(access.step));
    add(access);
  }

  void touch(const Part& part, bool write) {
    Access access = now_;
    access.write = write;
    access.part = &part;
    add(access);
  }

  void add(const Access& access) {
    const Clock3& known = clocks_[access.stream];
    for (const Access& other : accesses_) {
      if (!(access.write || other.write) || !overlap(access, other, rounds_.program->places)) continue;
      // Messages of one group have no order among themselves.
      const bool ordered = other.step != access.step && known[other.stream] >= other.time;
      if (ordered || !mistake_.empty()) continue;
      mistake_ = fmt::format("rank {}: no order between {} and {}, which touch the same {}",
                             rounds_.program->rank, describe(other.step), describe(access.step),
                             access.part == nullptr ? fmt::format("staging at {}", access.staging)
                                                    : fmt::format("part of tensor {}", access.part->tensor));
    }
    accesses_.push_back(access);
  }

  std::string describe(size_t i) const {
    const RoundStep& step = rounds_.steps[i];
    if (step.kind == StepKind::Exchange) return fmt::format("step {} (exchange of round {})", i, step.round);
    static constexpr std::array<const char*, 4> kNames = {"copy", "pack", "unpack", "reduce"};
    const auto kind = rounds_.kernels[static_cast<size_t>(step.begin)].kind;
    return fmt::format("step {} ({})", i, kNames[static_cast<size_t>(kind)]);
  }

  const RankRounds& rounds_;
  std::array<Clock3, kStreams> clocks_{};
  std::vector<Clock3> events_;
  std::vector<Access> accesses_;
  Access now_;
  std::string mistake_;
};

}  // namespace

std::string check_streams(const RankRounds& rounds) { return StreamCheck(rounds).run(); }

}  // namespace meshcast
