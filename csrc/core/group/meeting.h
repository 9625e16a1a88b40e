#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/sync.h"
#include "group/agreement.h"
#include "group/board_store.h"
#include "group/conversation.h"
#include "group/group_core.h"
#include "group/refusals.h"
#include "group/store.h"

namespace meshcast {

// A meeting failed for the call that wanted it, and not for its group: the ranks may meet again, in another
// generation. For example, a rank has run out of threads or descriptors, or refused its arguments.
struct MeetAgainError : Error {
  explicit MeetAgainError(const Error& error) : Error(error) {}
};

// A rank that is lost, and the evidence.
struct LostRank {
  int32_t rank = -1;
  std::string why;
};

// What ranks offered when they met before, in any group of the same process group. Thread-safe.
class KnownOffers {
 public:
  void add(const std::map<int32_t, std::string>& offers);
  std::optional<std::string> of(int32_t rank) const;

 private:
  mutable Mutex mutex_;
  std::map<int32_t, std::string> offers_;
};

// Returns why a rank is lost, "" if it is not known to be. Null if the rank cannot be watched.
using Watch = std::function<std::string()>;

// One rank's part in bringing up one generation of a group: its sockets and its memory. Used by one thread.
class Joining {
 public:
  virtual ~Joining() = default;
  virtual std::string offer() = 0;                    // what the other ranks must know to connect with this one
  virtual Watch watch(const std::string& offer) = 0;  // of the rank that made the offer
  // Called once all ranks have come. Blocks to `deadline`. lost: looks for a lost rank, at most 20 times a
  // second; throws if another rank has given up.
  virtual std::shared_ptr<GroupCore> connect(const std::map<int32_t, std::string>& offers, TimePoint deadline,
                                             const std::function<std::optional<LostRank>()>& lost) = 0;
};

// What a group needs of the machine. Thread-safe.
class Connector {
 public:
  virtual ~Connector() = default;
  // A connection in which no request waits, the same one each time; made at the first call, which may block for
  // as long as the store's own limit.
  virtual std::shared_ptr<Store> store() = 0;
  // prefix: of the keys of this generation. Throws MeetAgainError if this process has run out of a resource.
  virtual std::unique_ptr<Joining> join(const std::string& prefix) = 0;
  // The error to raise for a failure that is due to such a shortage; none if it is not.
  virtual std::optional<Error> shortage(const std::exception& failure) = 0;
};

// What one rank knows of the others while they wait for each other. Thread-safe.
class Watches {
 public:
  // watch: makes the Watch of a rank from what it has said, here or, as `known`, when it met others earlier.
  Watches(std::shared_ptr<const KnownOffers> known, std::function<Watch(const std::string& said)> watch)
      : known_(std::move(known)), watch_(std::move(watch)) {}

  // Watches the next of these ranks that has come, and those before it that are known from earlier. So each
  // rank is watched by one other, which costs one connection. each: watches all of them. topic: of what they
  // have said. has_come: whether the rank at that place has come, if that is known without a request.
  std::optional<LostRank> lost(Conversation& conversation, const std::string& topic,
                               const std::vector<int32_t>& ranks, bool each = false,
                               const std::function<bool(size_t at)>& has_come = {});
  // The same for all known ranks, without a store. Waits up to half a second for a loss to be noticed.
  std::optional<LostRank> lost_soon(const std::vector<int32_t>& ranks, int32_t rank);

 private:
  void watch(int32_t rank, const std::optional<std::string>& said);
  std::optional<Watch> watch_of(int32_t rank) const;
  std::optional<LostRank> ask(int32_t rank) const;

  const std::shared_ptr<const KnownOffers> known_;
  const std::function<Watch(const std::string& said)> watch_;
  mutable Mutex mutex_;  // not held while a Watch is called
  std::map<int32_t, Watch> watches_;
};

// By lane, the ordinal of the first call that a rank has still to make.
using Ordinals = std::map<int32_t, int64_t>;

// A generation of a group that has begun; or (no core) one that ended before that, since a rank refused the
// call that others met for: the ranks meet at once for the next.
struct Met {
  std::shared_ptr<GroupCore> core;
  Ordinals first;                      // of the calls that all ranks have still to make
  std::optional<RefusedCall> refused;  // none if what was refused is no call
};

// The place of a generation's keys in the store.
struct GenerationKeys {
  std::string prefix;
  std::shared_ptr<BoardStore> store;  // the keys below the prefix
};

// What one rank brings to a meeting.
struct MeetingPart {
  std::function<GenerationKeys()> generation;  // begins the next generation
  std::string what;                            // the call that the ranks meet for; without a blank
  std::function<Ordinals()> next;              // of this rank
  TimePoint deadline;
  std::function<std::string()> closing;  // why this rank ends the group; "" while it does not
  std::function<void()> waits;           // called once this rank has waited for more than a moment; may be null
};

// Waits until every rank of the group has come, then connects. The first rank that sees all, or that gives up,
// decides for all: if each decided for itself, one could leave while the others connect, which would then wait
// for it to their limits.
//
// Throws MeetAgainError if the call that this rank meets for fails, and the ranks may meet again;
// DeadlineExceeded, PeerLost or Aborted otherwise.
Met meet(const GroupIdentity& group, Connector& connector, const std::shared_ptr<KnownOffers>& known,
         const MeetingPart& part);

// What a meeting for a call is for, as MeetingPart::what.
std::string meeting_for(CallId call);

// counts: the refusal is the verdict of a meeting, or, for a refused call, the ranks that meet for it end
// there. If not, they meet for it in the next generation, and `instead` is the call that was refused before, if
// any.
struct RefusedMeeting {
  bool counts = false;
  std::optional<RefusedCall> instead;
};

// Ends a meeting for all ranks, without waiting for them: this one has refused the call that they meet for, or,
// if `what` is empty, has run out of a resource.
RefusedMeeting refuse_meeting(const std::shared_ptr<BoardStore>& store, int32_t rank, const std::string& what,
                              const std::string& why);

}  // namespace meshcast
