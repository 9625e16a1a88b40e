#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "rounds/round_table.h"
#include "rounds/tensor_forms.h"
#include "run/program.h"

namespace meshcast {

// The streams of a run: the caller's, whose earlier work made the tensors and whose later work uses them; one
// for kernels, one for groups of NCCL.
enum class StreamRole : uint8_t { Caller, Kernels, Transfer };

// A message that one rank sends to one peer, or receives from it, in one round.
struct RoundMessage {
  bool send = false;
  int32_t peer = -1;  // group-local
  int64_t nbytes = 0;
  int64_t staging = -1;  // offset; -1: straight from or into the tensor
  int32_t part = -1;     // of the program, where staging is -1
  int32_t hop = -1;      // of the plan
};

enum class KernelKind : uint8_t { Copy, Pack, Unpack, Reduce };

// Work of a kernel. Copy: the program's copy number `copy`. Pack: `parts` into staging; Unpack: back. Reduce:
// staging = op(own values `parts`, staging), divided by `divisor`.
struct KernelOp {
  KernelKind kind = KernelKind::Copy;
  PartRange parts;
  int64_t staging = -1;
  int64_t nbytes = 0;
  int32_t copy = -1;
  ReduceOp reduce = ReduceOp::None;
  int32_t divisor = 1;
};

enum class StepKind : uint8_t { Record, Wait, Kernels, Exchange };

// One thing to enqueue. Record and Wait: `event` on `stream`. Kernels: operations [begin, end) of one kind, on
// the kernel stream. Exchange: messages [begin, end) as one group, on the transfer stream; `round` of the
// table.
struct RoundStep {
  StepKind kind = StepKind::Record;
  StreamRole stream = StreamRole::Caller;
  int32_t event = -1;
  int32_t begin = 0;
  int32_t end = 0;
  int32_t round = -1;
};

// All that one rank enqueues for one run, in this order. Holds no addresses.
struct RankRounds {
  std::shared_ptr<const Program> program;
  TensorForms forms;
  std::vector<RoundStep> steps;
  std::vector<RoundMessage> messages;
  std::vector<KernelOp> kernels;
  int32_t events = 0;         // that are needed; one is recorded again once nothing waits for what it recorded
  int64_t staging_bytes = 0;  // one piece of memory, aligned to kStagingAlignment
};

inline constexpr int64_t kStagingAlignment = 256;

// Projects the rounds of a plan on one (global) rank. `program` is project(plan, rank, group) without local
// ranks: NCCL itself knows which ranks share a host. Pure. Throws Error where the program or the forms do not
// fit the plan.
RankRounds schedule_rank(const Plan& plan, const RoundTable& table, int32_t rank,
                         std::shared_ptr<const Program> program, const TensorForms& forms);

}  // namespace meshcast
