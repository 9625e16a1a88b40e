#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "layout/box.h"
#include "memory/strided.h"
#include "plan/plan.h"

namespace meshcast {

// Messages up to this size are packed and issued by the caller of a start, and so many bytes of local copies
// are made by it: waking a thread would cost more.
inline constexpr int64_t kInlineBytes = 64 * 1024;

// Which of a rank's two local tensors of a problem.
enum class Side : uint8_t { Source, Destination };

// A box of one local tensor, by local index. Becomes a StridedView once the tensors are known (part_view).
struct Part {
  int32_t tensor = 0;
  Side side = Side::Source;
  int8_t ndim = 0;
  int64_t element_bytes = 0;
  std::array<int64_t, kMaxDims> at{};  // one index for each dimension of the local tensor
  std::array<int64_t, kMaxDims> extent{};
  int32_t place = -1;   // into Program::places; -1: the box has the dimensions of the local tensor
  int64_t first = 0;    // position of its first element in the whole tensor, row-major
  bool counts = false;  // added to the digest of arrived data as it is written
};

// Parts [begin, end) of Program::parts, packed one after the other on the wire.
struct PartRange {
  int32_t begin = 0;
  int32_t end = 0;
};

struct RecvOp {
  int32_t peer = -1;  // group-local rank
  int64_t nbytes = 0;
  bool local = false;             // through the memory that the two share
  int32_t number = -1;            // over the network: the number-th of the program, from 0
  PartRange parts;                // where it is written
  std::vector<int32_t> forwards;  // indices into Program::sends that wait for it
  // A partial value arrives: it is combined with this rank's own, and the outcome is forwarded or kept.
  ReduceOp reduce = ReduceOp::None;
  PartRange own;        // this rank's own partial values, as they lie in `parts`
  int32_t divisor = 1;  // for an average that ends here
  int32_t carry = -1;   // number, from 0, among those whose outcome does not belong here; `parts` is empty
};

// A receiver of a message, and the message's index among those of the program between the two ranks.
struct Target {
  int32_t peer = -1;
  int32_t index = 0;
};

struct SendOp {
  std::vector<Target> targets;  // one over the network, any number inside a host
  int64_t nbytes = 0;
  bool local = false;
  PartRange parts;       // where it is read: the source shard, or the destination once it has arrived
  int32_t number = -1;   // over the network: the number-th of the program, from 0
  bool forward = false;  // becomes ready through a RecvOp, not at the start
  int32_t carry = -1;    // the value that the receive of this number kept; `parts` is empty
};

// Messages of a program to one peer of this host.
struct LocalSends {
  int32_t peer = -1;
  int32_t count = 0;
};

struct CopyOp {
  Part from;
  Part to;
};

// The operations of one kind with one peer, as indices into Program::recvs or Program::sends, in plan order.
struct PeerOps {
  int32_t peer = -1;
  std::vector<int32_t> ops;
};

// For the digest of the arrived data of one tensor: the distance of neighbouring elements in it, by dimension,
// and whether each element of the rank's shard counts as it is written.
struct Digestible {
  std::array<int64_t, kMaxDims> step{};
  bool whole = false;
};

// What one rank does for one plan, in plan order. Holds no addresses: one program serves every run.
struct Program {
  int32_t rank = -1;  // group-local
  std::vector<Part> parts;
  std::vector<BoxPlace> places;
  std::vector<RecvOp> recvs;
  std::vector<SendOp> sends;
  std::vector<CopyOp> copies;
  std::vector<LocalSends> local_sends;    // by ascending peer
  std::vector<PeerOps> network_recvs_of;  // by ascending peer, so that a start need not sort them
  std::vector<PeerOps> network_sends_of;
  std::vector<PeerOps> local_recvs_of;
  bool copies_are_small = true;  // made by the caller of a start
  int32_t network_recvs = 0;
  int32_t network_sends = 0;
  bool relayed = false;                // some chunk of the plan is forwarded from one host to another
  bool sends_longest = false;          // only without relays: the run waits for this rank's NIC
  std::vector<int32_t> carried_sends;  // by RecvOp::carry: sends that need it
  int32_t most_carried = 0;            // buffers for them, see carries.h
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  std::vector<Digestible> digests;  // by tensor
};

// The memory of a part in a local tensor with these strides (bytes), whose elements of `element_bytes` begin at
// `base`; if that is null, only the shape of the view is valid.
StridedView part_view(const Part& part, const std::vector<BoxPlace>& places,
                      const std::array<int64_t, kMaxDims>& stride, int64_t element_bytes, std::byte* base);

// Projects a plan on one rank. `rank` and `group` are global ranks; `group` ascends and holds every rank of the
// plan. `local` are the ranks that share memory with this one, itself included (or none), and has to be the
// same on all of them: between them, a chain becomes one message from its first rank to all others, which is
// copied in once. Throws Error if the plan asks for what a program cannot do.
Program project(const Plan& plan, int32_t rank, const std::vector<int32_t>& group,
                const std::vector<int32_t>& local = {});

}  // namespace meshcast
