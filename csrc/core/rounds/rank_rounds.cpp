#include "rounds/rank_rounds.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "rounds/staging_arena.h"

namespace meshcast {
namespace {

// Exchanges after the one that received it for which a message that has to be unpacked stays in staging, so
// that it can be forwarded from there, in the very next exchange, while it is being unpacked. A later forward
// packs it again, from where it was unpacked to: staging stays bounded however late that is.
constexpr int32_t kHeldExchanges = 2;

// Drops events for which no step waits and numbers the others so that an event is recorded again once nothing
// will wait for what it recorded before. Returns how many there are.
// A wait takes what was last recorded when the wait was enqueued. So one event serves many records, one after
// the other, as long as each is waited for before the next is made: a register allocation over the list of
// steps.
int32_t number_events(std::vector<RoundStep>* steps) {
  std::vector<int32_t> last_wait;  // by event as it is: position of the last step that waits for it
  for (size_t i = 0; i < steps->size(); ++i) {
    const RoundStep& step = (*steps)[i];
    if (step.event < 0) continue;
    last_wait.resize(std::max(last_wait.size(), static_cast<size_t>(step.event) + 1), -1);
    if (step.kind == StepKind::Wait) last_wait[static_cast<size_t>(step.event)] = static_cast<int32_t>(i);
  }
  std::vector<int32_t> number(last_wait.size(), -1);
  std::vector<int32_t> spare;
  int32_t count = 0;
  std::vector<RoundStep> kept;
  for (size_t i = 0; i < steps->size(); ++i) {
    RoundStep step = (*steps)[i];
    if (step.event >= 0) {
      const auto event = static_cast<size_t>(step.event);
      if (last_wait[event] < 0) continue;
      if (step.kind == StepKind::Record) {
        if (spare.empty()) spare.push_back(count++);
        number[event] = spare.back();
        spare.pop_back();
      }
      step.event = number[event];
      if (last_wait[event] == static_cast<int32_t>(i)) spare.push_back(step.event);
    }
    kept.push_back(step);
  }
  *steps = std::move(kept);
  return count;
}

// Two streams run in parallel: kernels (pack, reduce, unpack, copy) and transfer (exchanges). Each is in order,
// so a stream that has waited for exchange i, or for the kernel step of mark m, has waited for all before it:
// the *_saw_ numbers are all that is needed to leave out waits.
//
// Three exchanges of a rank, as enqueued; steps in one column may overlap on the GPU:
//   kernels    pack 0   copies, pack 1   take in 0, pack 2   take in 1         take in 2
//   transfer            exchange 0       exchange 1          exchange 2
class RankScheduler {
 public:
  RankScheduler(const Plan& plan, const RoundTable& table, int32_t rank, std::shared_ptr<const Program> program,
                const TensorForms& forms)
      : program_(*program), forms_(forms) {
    out_.program = std::move(program);
    out_.forms = forms;
    check_forms(plan, forms);
    check_sums();
    sort_into_exchanges(plan, table, rank);
  }

  RankRounds run() {
    // Phase 1: the caller's earlier work, behind which both streams begin.
    start_event_ = new_event();
    out_.steps.push_back({StepKind::Record, StreamRole::Caller, start_event_});
    // Phase 2: the exchanges. Packing for the next comes before taking in of this one, as the next exchange
    // waits for it.
    const auto count = static_cast<int32_t>(exchanges_.size());
    if (count > 0) pack_for(0);
    copy_local();
    for (int32_t i = 0; i < count; ++i) {
      exchange(i);
      if (i + 1 < count) pack_for(i + 1);  // while exchange i is under way
      take_in(i);
    }
    // Phase 3: the caller's stream comes behind both; then events and staging are counted.
    join_caller();
    out_.staging_bytes = arena_.size();
    out_.events = number_events(&out_.steps);
    return std::move(out_);
  }

 private:
  struct Entry {
    int32_t hop = -1;
    bool send = false;
    int32_t op = -1;  // index into the program's sends or receives
  };

  struct Exchange {
    int32_t round = -1;
    std::vector<Entry> entries;  // in plan order, as at the other end
  };

  struct Incoming {
    int32_t exchange = -1;
    bool staged = false;
    int64_t offset = -1;
    int32_t reduced = -1;  // mark of its reduction
    int32_t done = -1;     // mark of the last kernel that touches it
  };

  struct Outgoing {
    int32_t exchange = -1;
    int32_t from = -1;     // receive that brings it
    int64_t staging = -1;  // where it is read; -1: straight from the tensor
    int32_t packed = -1;   // mark
  };

  void check_sums() const {
    for (const RecvOp& op : program_.recvs) {
      for (int32_t i = op.own.begin; i < op.own.end; ++i) {
        if (casts(program_.parts[static_cast<size_t>(i)]))
          throw Error(ErrorKind::Generic,
                      "a Partial source is reduced in its own type, so it has to travel in it");
      }
    }
  }

  void sort_into_exchanges(const Plan& plan, const RoundTable& table, int32_t rank) {
    incoming_.resize(program_.recvs.size());
    outgoing_.resize(program_.sends.size());
    // Without local ranks, messages of a program and hops of the plan are one for one.
    std::vector<std::pair<int32_t, Entry>> entries;
    int32_t recvs = 0;
    int32_t sends = 0;
    for (size_t i = 0; i < plan.hops.size(); ++i) {
      const Hop& hop = plan.hops[i];
      if (hop.src != rank && hop.dst != rank) continue;
      const bool send = hop.src == rank;
      entries.push_back({table.of_hop[i], {static_cast<int32_t>(i), send, send ? sends++ : recvs++}});
    }
    if (recvs != static_cast<int32_t>(program_.recvs.size()) ||
        sends != static_cast<int32_t>(program_.sends.size()))
      throw Error(ErrorKind::Generic, fmt::format("rank {} has a program that is not of this plan", rank));
    std::stable_sort(entries.begin(), entries.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [round, entry] : entries) {
      if (exchanges_.empty() || exchanges_.back().round != round) exchanges_.push_back({round, {}});
      exchanges_.back().entries.push_back(entry);
      const auto number = static_cast<int32_t>(exchanges_.size()) - 1;
      if (entry.send)
        outgoing_[static_cast<size_t>(entry.op)].exchange = number;
      else
        incoming_[static_cast<size_t>(entry.op)].exchange = number;
    }
    for (size_t r = 0; r < program_.recvs.size(); ++r) {
      const RecvOp& op = program_.recvs[r];
      incoming_[r].staged = op.carry >= 0 || op.reduce != ReduceOp::None || !direct(op.parts);
      for (const int32_t send : op.forwards)
        outgoing_[static_cast<size_t>(send)].from = static_cast<int32_t>(r);
    }
  }

  const TensorForm& form_of(const Part& part) const {
    return (part.side == Side::Source ? forms_.source : forms_.destination)[static_cast<size_t>(part.tensor)];
  }

  bool casts(const Part& part) const {
    return form_of(part).type != forms_.wire[static_cast<size_t>(part.tensor)];
  }

  // Whether the message is one contiguous piece of a tensor, as it travels.
  bool direct(PartRange range) const {
    if (range.end - range.begin != 1) return false;
    const Part& part = program_.parts[static_cast<size_t>(range.begin)];
    const TensorForm& form = form_of(part);
    return !casts(part) &&
           part_view(part, program_.places, form.stride, form.element_bytes, nullptr).contiguous();
  }

  bool forwarded_from_staging(const Outgoing& send, const RecvOp& op, const Incoming& recv) const {
    return recv.staged && (op.carry >= 0 || send.exchange <= recv.exchange + kHeldExchanges);
  }

  int32_t new_event() { return next_event_++; }

  // Kernels from `begin` on as one step. Returns its mark.
  int32_t launch(int32_t begin) {
    const auto end = static_cast<int32_t>(out_.kernels.size());
    follow_caller(StreamRole::Kernels, &kernels_follow_);
    out_.steps.push_back({StepKind::Kernels, StreamRole::Kernels, -1, begin, end});
    mark_event_.push_back(new_event());
    out_.steps.push_back({StepKind::Record, StreamRole::Kernels, mark_event_.back()});
    return static_cast<int32_t>(mark_event_.size()) - 1;
  }

  void kernels_wait_for(int32_t exchange) {
    if (exchange <= kernels_saw_) return;
    kernels_saw_ = exchange;
    kernels_follow_ = true;
    out_.steps.push_back({StepKind::Wait, StreamRole::Kernels, exchange_event_[static_cast<size_t>(exchange)]});
  }

  void transfer_waits_for(int32_t mark) {
    if (mark <= transfer_saw_) return;
    transfer_saw_ = mark;
    transfer_follows_ = true;
    out_.steps.push_back({StepKind::Wait, StreamRole::Transfer, mark_event_[static_cast<size_t>(mark)]});
  }

  // The first thing on a stream comes after the caller's earlier work, if only by what it has waited for.
  void follow_caller(StreamRole stream, bool* follows) {
    if (!*follows) out_.steps.push_back({StepKind::Wait, stream, start_event_});
    *follows = true;
  }

  void join_caller() {
    const auto last_mark = static_cast<int32_t>(mark_event_.size()) - 1;
    const auto last_exchange = static_cast<int32_t>(exchange_event_.size()) - 1;
    // At most one of the two streams has waited for all of the other.
    if (last_mark > transfer_saw_)
      out_.steps.push_back({StepKind::Wait, StreamRole::Caller, mark_event_.back()});
    if (last_exchange > kernels_saw_)
      out_.steps.push_back({StepKind::Wait, StreamRole::Caller, exchange_event_.back()});
    if (last_mark < 0 && last_exchange < 0) out_.steps.clear();
  }

  void copy_local() {
    const auto begin = static_cast<int32_t>(out_.kernels.size());
    for (size_t i = 0; i < program_.copies.size(); ++i) {
      KernelOp op;
      op.kind = KernelKind::Copy;
      op.copy = static_cast<int32_t>(i);
      out_.kernels.push_back(op);
    }
    if (!program_.copies.empty()) launch(begin);
  }

  // Finds the source of each message that leaves in exchange i, and packs those that have to be.
  void pack_for(int32_t i) {
    const auto begin = static_cast<int32_t>(out_.kernels.size());
    int32_t read_before = -1;  // exchange that used the memory
    for (const Entry& entry : exchanges_[static_cast<size_t>(i)].entries) {
      if (!entry.send) continue;
      Outgoing& send = outgoing_[static_cast<size_t>(entry.op)];
      const SendOp& op = program_.sends[static_cast<size_t>(entry.op)];
      if (send.from >= 0) {
        const Incoming& recv = incoming_[static_cast<size_t>(send.from)];
        if (forwarded_from_staging(send, program_.recvs[static_cast<size_t>(send.from)], recv)) {
          send.staging = recv.offset;
          continue;
        }
      }
      if (direct(op.parts)) continue;
      // In use from the packing, during exchange i - 1, to the end of exchange i.
      const StagingArena::Buffer buffer = arena_.take(op.nbytes, i - 1, i);
      send.staging = buffer.offset;
      send.packed = static_cast<int32_t>(mark_event_.size());  // of the launch below
      read_before = std::max(read_before, buffer.before.exchange);
      out_.kernels.push_back({KernelKind::Pack, op.parts, buffer.offset, op.nbytes});
    }
    if (static_cast<int32_t>(out_.kernels.size()) == begin) return;
    kernels_wait_for(read_before);
    launch(begin);
  }

  void exchange(int32_t i) {
    const Exchange& now = exchanges_[static_cast<size_t>(i)];
    const auto begin = static_cast<int32_t>(out_.messages.size());
    int32_t needed = -1;  // mark
    for (const Entry& entry : now.entries) {
      RoundMessage message;
      message.send = entry.send;
      message.hop = entry.hop;
      needed =
          std::max(needed, entry.send ? send_in(i, entry.op, &message) : receive_in(i, entry.op, &message));
      out_.messages.push_back(message);
    }
    transfer_waits_for(needed);
    follow_caller(StreamRole::Transfer, &transfer_follows_);
    out_.steps.push_back({StepKind::Exchange, StreamRole::Transfer, -1, begin,
                          static_cast<int32_t>(out_.messages.size()), now.round});
    exchange_event_.push_back(new_event());
    out_.steps.push_back({StepKind::Record, StreamRole::Transfer, exchange_event_.back()});
  }

  // Both return the mark that has to be over before.
  int32_t send_in(int32_t i, int32_t index, RoundMessage* message) {
    const SendOp& op = program_.sends[static_cast<size_t>(index)];
    const Outgoing& send = outgoing_[static_cast<size_t>(index)];
    message->peer = op.targets.front().peer;
    message->nbytes = op.nbytes;
    message->staging = send.staging;
    if (send.staging >= 0)
      arena_.used(send.staging, {i, -1});
    else
      message->part = op.parts.begin;
    if (send.packed >= 0 || send.from < 0) return send.packed;
    const Incoming& recv = incoming_[static_cast<size_t>(send.from)];
    return send.staging >= 0 ? recv.reduced : recv.done;
  }

  int32_t receive_in(int32_t i, int32_t index, RoundMessage* message) {
    const RecvOp& op = program_.recvs[static_cast<size_t>(index)];
    Incoming& recv = incoming_[static_cast<size_t>(index)];
    message->peer = op.peer;
    message->nbytes = op.nbytes;
    if (!recv.staged) {
      message->part = op.parts.begin;
      return -1;
    }
    int32_t last = i + 1;  // its kernels run while the next exchange does
    for (const int32_t forward : op.forwards) {
      const Outgoing& send = outgoing_[static_cast<size_t>(forward)];
      if (forwarded_from_staging(send, op, recv)) last = std::max(last, send.exchange);
    }
    const StagingArena::Buffer buffer = arena_.take(op.nbytes, i, last);
    arena_.used(buffer.offset, {i, -1});
    recv.offset = message->staging = buffer.offset;
    return buffer.before.mark;
  }

  // Reduces and unpacks the messages of exchange i.
  void take_in(int32_t i) {
    const auto each = [&](const auto& visit) {
      for (const Entry& entry : exchanges_[static_cast<size_t>(i)].entries) {
        if (entry.send || !incoming_[static_cast<size_t>(entry.op)].staged) continue;
        visit(program_.recvs[static_cast<size_t>(entry.op)], incoming_[static_cast<size_t>(entry.op)]);
      }
    };
    // The next mark, if there are kernels for it.
    const auto next_mark = [&] { return static_cast<int32_t>(mark_event_.size()); };
    auto begin = static_cast<int32_t>(out_.kernels.size());
    each([&](const RecvOp& op, Incoming& recv) {
      if (op.reduce == ReduceOp::None) return;
      recv.reduced = recv.done = next_mark();
      out_.kernels.push_back({KernelKind::Reduce, op.own, recv.offset, op.nbytes, -1, op.reduce, op.divisor});
    });
    if (static_cast<int32_t>(out_.kernels.size()) > begin) {
      kernels_wait_for(i);
      launch(begin);
    }
    begin = static_cast<int32_t>(out_.kernels.size());
    each([&](const RecvOp& op, Incoming& recv) {
      if (op.parts.begin == op.parts.end) return;
      recv.done = next_mark();
      out_.kernels.push_back({KernelKind::Unpack, op.parts, recv.offset, op.nbytes});
    });
    if (static_cast<int32_t>(out_.kernels.size()) > begin) {
      kernels_wait_for(i);
      launch(begin);
    }
    each([&](const RecvOp&, Incoming& recv) { arena_.used(recv.offset, {-1, recv.done}); });
  }

  const Program& program_;
  const TensorForms& forms_;
  std::vector<Exchange> exchanges_;
  std::vector<Incoming> incoming_;  // by receive of the program
  std::vector<Outgoing> outgoing_;  // by send
  StagingArena arena_;

  std::vector<int32_t> mark_event_;      // by mark: kernel steps are numbered
  std::vector<int32_t> exchange_event_;  // by exchange
  int32_t next_event_ = 0;
  int32_t start_event_ = -1;
  bool kernels_follow_ = false;  // the caller's stream
  bool transfer_follows_ = false;
  int32_t kernels_saw_ = -1;   // the last exchange that the kernel stream waited for
  int32_t transfer_saw_ = -1;  // the last mark that the transfer stream waited for
  RankRounds out_;
};

}  // namespace

RankRounds schedule_rank(const Plan& plan, const RoundTable& table, int32_t rank,
                         std::shared_ptr<const Program> program, const TensorForms& forms) {
  return RankScheduler(plan, table, rank, std::move(program), forms).run();
}

}  // namespace meshcast
