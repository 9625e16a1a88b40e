#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <vector>

#include "plan/plan.h"
#include "run/engine.h"
#include "run/program.h"
#include "support/loopback.h"
#include "transport/shm_transport.h"

namespace meshcast::testing {

// Row-major local tensor of int64 elements whose value is the element's global linear index.
struct LocalTensor {
  std::vector<int64_t> data;
  TensorMemory memory;
};

inline int64_t linear_index(const std::vector<int64_t>& shape, const std::vector<int64_t>& index) {
  int64_t out = 0;
  for (size_t d = 0; d < shape.size(); ++d) out = out * shape[d] + index[d];
  return out;
}

// Where an element of piece `p`, of this global index, lies in a local tensor of these strides.
template <class Strides>
int64_t local_offset(const Shard& shard, size_t p, const std::vector<int64_t>& index, const Strides& strides) {
  const ShardPiece& piece = shard.pieces[p];
  int64_t at = 0;
  for (size_t d = 0; d < shard.local_shape.size(); ++d) at += piece.local[d] * strides[d];
  for (size_t d = 0; d < index.size(); ++d) {
    const size_t axis = shard.places.empty() ? d : static_cast<size_t>(shard.places[p].axis[d]);
    const int64_t step = shard.places.empty() ? 1 : shard.places[p].step[d];
    at += (index[d] - piece.box.lo[d]) * step * strides[axis];
  }
  return at;
}

// fill: write the true values; otherwise -1 everywhere.
inline LocalTensor make_local(const Shard& shard, const std::vector<int64_t>& shape, bool fill) {
  LocalTensor out;
  const size_t n = shard.local_shape.size();
  std::vector<int64_t> strides(n);
  int64_t size = 1;
  for (size_t d = n; d-- > 0;) {
    strides[d] = size;
    size *= shard.local_shape[d];
  }
  out.data.assign(static_cast<size_t>(std::max<int64_t>(size, 1)), -1);
  out.memory.data = reinterpret_cast<std::byte*>(out.data.data());
  for (size_t d = 0; d < n; ++d) out.memory.stride[d] = strides[d] * 8;
  if (!fill) return out;
  for (size_t p = 0; p < shard.pieces.size(); ++p) {
    const ShardPiece& piece = shard.pieces[p];
    const size_t dims = shape.size();
    std::vector<int64_t> index(dims);
    for (size_t d = 0; d < dims; ++d) index[d] = piece.box.lo[d];
    for (int64_t i = 0; i < piece.box.volume(); ++i) {
      const int64_t at = local_offset(shard, p, index, strides);
      out.data[static_cast<size_t>(at)] = linear_index(shape, index);
      for (size_t d = dims; d-- > 0;) {
        if (++index[d] < piece.box.hi[d]) break;
        index[d] = piece.box.lo[d];
      }
    }
  }
  return out;
}

inline Shard shard_of(const Layout& layout, const std::vector<int64_t>& shape, int32_t rank) {
  for (Shard& shard : shards(layout, shape)) {
    if (shard.rank == rank) return shard;
  }
  return {};
}

// What each rank has as if it were a process.
using Progresses = std::vector<std::shared_ptr<Progress>>;

inline Progresses make_progresses(int world) {
  Progresses out;
  for (int rank = 0; rank < world; ++rank) out.push_back(std::make_shared<Progress>());
  return out;
}

// Shared memory between these ranks of this process; by rank, null for the others. Each has a ShmProgress of
// its own, over that of `progresses`, unless they are to share that of this one.
inline std::vector<ShmMembership> meet_local(int world, const std::vector<int32_t>& ranks, bool one_process,
                                             const Progresses& progresses = {}) {
  std::vector<std::unique_ptr<ShmRendezvous>> rendezvous;
  std::vector<ShmMember> members;
  for (const int32_t rank : ranks) {
    rendezvous.push_back(std::make_unique<ShmRendezvous>(
        static_cast<uint32_t>(world),
        one_process          ? ShmProgress::of_process()
        : progresses.empty() ? std::make_shared<ShmProgress>(std::make_shared<Progress>())
                             : std::make_shared<ShmProgress>(progresses[static_cast<size_t>(rank)])));
    members.push_back({rank, rendezvous.back()->address()});
  }
  std::vector<std::future<ShmMembership>> meetings;
  for (size_t i = 0; i < ranks.size(); ++i) {
    meetings.push_back(std::async(std::launch::async, [&, i] {
      return rendezvous[i]->meet(members, ranks[i], Clock::now() + std::chrono::seconds(20));
    }));
  }
  std::vector<ShmMembership> out;
  for (auto& meeting : meetings) out.push_back(meeting.get());
  return out;
}

inline std::vector<std::shared_ptr<LocalTransport>> connect_local(int world, const std::vector<int32_t>& ranks,
                                                                  bool one_process = false,
                                                                  const Progresses& progresses = {}) {
  auto memberships = meet_local(world, ranks, one_process, progresses);
  std::vector<std::shared_ptr<LocalTransport>> out(static_cast<size_t>(world));
  for (size_t i = 0; i < ranks.size(); ++i) {
    out[static_cast<size_t>(ranks[i])] = make_shm_transport(std::move(memberships[i]));
  }
  return out;
}

// All ranks of a plan in one process: an engine each over the loopback transport, and over shared memory
// between the ranks of each host in `hosts`.
class Cluster {
 public:
  using Wrap = std::function<std::shared_ptr<Transport>(int rank, std::shared_ptr<Transport>)>;

  // wrap: what each rank's network goes through, if anything. progresses: for connect_local().
  explicit Cluster(int world, ChannelFailure failure = nullptr, std::vector<std::vector<int32_t>> hosts = {},
                   const Wrap& wrap = nullptr, bool one_process = false, const Progresses& progresses = {})
      : transports_(make_loopback(world)), hosts_(std::move(hosts)) {
    std::vector<std::shared_ptr<LocalTransport>> local(static_cast<size_t>(world));
    for (const auto& host : hosts_) {
      auto connected = connect_local(world, host, one_process, progresses);
      for (const int32_t rank : host) local[static_cast<size_t>(rank)] = connected[static_cast<size_t>(rank)];
    }
    for (int rank = 0; rank < world; ++rank) {
      group_.push_back(rank);
      const auto& network = transports_[static_cast<size_t>(rank)];
      engines_.push_back(std::make_unique<Engine>(
          wrap ? wrap(rank, network) : network,
          failure
              ? failure
              : [this, rank](
                    int, const TransportError& error,
                    const std::shared_ptr<
                        Run>&) { engines_[static_cast<size_t>(rank)]->fail(std::make_exception_ptr(error)); },
          local[static_cast<size_t>(rank)]));
    }
  }

  ~Cluster() {
    for (auto& engine : engines_) {
      engine->shutdown(std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "test over")));
    }
  }

  Engine& engine(int rank) { return *engines_[static_cast<size_t>(rank)]; }
  void kill(int rank) { kill_loopback_rank(transports_.front(), rank); }
  const std::vector<int32_t>& group() const { return group_; }

  // The ranks that share memory with this one.
  std::vector<int32_t> local(int32_t rank) const {
    for (const auto& host : hosts_) {
      if (std::find(host.begin(), host.end(), rank) != host.end()) return host;
    }
    return {};
  }

 private:
  std::vector<std::shared_ptr<Transport>> transports_;
  std::vector<std::vector<int32_t>> hosts_;
  std::vector<int32_t> group_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// One rank's part of one run, with its memory.
struct RankRun {
  LocalTensor source;
  LocalTensor destination;
  std::vector<int64_t> expected;
  std::shared_ptr<Run> run;
};

// nans: as Buffers has them.
inline RankRun start_rank(Cluster& cluster, const Plan& plan, int rank, RunLabel label,
                          std::chrono::milliseconds limit, std::vector<DigestNans> nans = {}) {
  const Problem& problem = plan.problems.front();
  RankRun part;
  const Shard source = shard_of(problem.src, problem.shape, rank);
  const Shard destination = shard_of(problem.dst, problem.shape, rank);
  part.source = make_local(source, problem.shape, true);
  part.destination = make_local(destination, problem.shape, false);
  part.expected = make_local(destination, problem.shape, true).data;
  Buffers buffers;
  buffers.source = {part.source.memory};
  buffers.destination = {part.destination.memory};
  buffers.nans = std::move(nans);
  part.run = cluster.engine(rank).start(
      std::make_shared<const Program>(project(plan, rank, cluster.group(), cluster.local(rank))), buffers,
      std::move(label), Clock::now() + limit);
  return part;
}

}  // namespace meshcast::testing
