#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "group/board_store.h"
#include "group/roll.h"
#include "group/store.h"
#include "transport/transport.h"

namespace meshcast {

// What a rank posts about one call of one lane: its descriptor, or that it refused its own arguments.
struct Posting {
  bool rejected = false;
  int32_t slot = -1;   // that the group's first rank assigns to this descriptor; -1 from the others
  std::string text;    // descriptor, or the reason of the rejection
  int32_t rank = -1;   // that posts this
  bool moves = false;  // it has agreed before, and moves data
};

// Why the group is broken, as reported by the rank that saw it first.
struct Cause {
  int32_t kind = 0;       // ErrorKind
  int32_t reporter = -1;  // global ranks
  int32_t peer = -1;
  std::string text;
};

// The peer that an error of `rank` names: the rank that was lost, or that gave up unless it is `rank`; else -1.
inline int32_t peer_in(const Cause& cause, int32_t rank) {
  const bool gave_up = cause.kind == static_cast<int32_t>(ErrorKind::Aborted) && cause.reporter != rank;
  return cause.peer < 0 && gave_up ? cause.reporter : cause.peer;
}

// As text, for the store and for peers; bounded. A text that cannot be parsed becomes a cause without a kind.
std::string encode(const Cause& cause);
Cause decode_cause(const std::string& text);

// The group's notice board in the rendezvous store. Plain text, bounded, nothing executed. A repeated poll
// costs one request, however many ranks there are. Every call throws what the store throws.
class Bulletin {
 public:
  explicit Bulletin(const std::shared_ptr<Store>& store) : store_(std::make_shared<BoardStore>(store)) {}

  // What a rank asks the others to agree on.
  void post(int32_t lane, int64_t ordinal, const Posting& posting);
  std::optional<Posting> read(int32_t lane, int64_t ordinal, int32_t rank);
  void erase(int32_t lane, int64_t ordinal, int32_t rank);

  // The ranks that have posted one text, given by its digest, for a call; and those that wait in a call. A rank
  // that froze after agreeing is in the first roll and not in the second.
  Roll agreeing(int32_t lane, int64_t ordinal, const std::string& digest, size_t ranks);
  Roll standing(int32_t lane, int64_t ordinal, size_t ranks);

  // The posting of the first rank that has waited in a call for long: `mine`, or that of an earlier rank.
  Posting first(int32_t lane, int64_t ordinal, const Posting& mine);
  // Posts that this rank rejects a call, or called it differently from the first; only the first objection is
  // kept.
  void object(int32_t lane, int64_t ordinal, const Posting& mine);
  std::optional<Posting> objection(int32_t lane, int64_t ordinal);
  void erase_said(int32_t lane, int64_t ordinal);  // the two postings above, if this rank wrote them

  // Posts that this rank's postings for calls of a lane up to this one are erased: it has left those calls.
  void pass(int32_t lane, int64_t ordinal, int32_t rank);
  std::optional<std::pair<int64_t, int32_t>> passed(int32_t lane);  // the last such call, and the rank

  // The decision about a call that a rank refused: `word`, or what another rank wrote before. A rank that
  // refused the call (keeps) is to erase it.
  std::string decide(int32_t lane, int64_t ordinal, const std::string& word, bool keeps);
  void erase_decision(int32_t lane, int64_t ordinal);

  // Posts that this rank has refused a call, and takes part in no call from there on up to a later one that
  // another rank refused before it knew of this.
  void leave_at(int32_t lane, int64_t ordinal, int32_t rank, const std::string& why);
  struct Left {
    int64_t ordinal = 0;
    int32_t rank = -1;
    std::string why;
  };
  std::optional<Left> left_at(int32_t lane);  // the first such call

  // Posts the oldest call of a lane that this rank has been in for long.
  void wait_in(int32_t lane, int64_t ordinal, int32_t rank);
  int64_t waits_in(int32_t lane, int32_t rank);  // the last that it posted; -1: none

  // Returns the cause that counts: this one, or the one that another rank wrote before.
  Cause settle_cause(const Cause& cause);
  std::optional<Cause> read_cause();

  const std::shared_ptr<BoardStore>& store() const { return store_; }
  TimePoint waits_since() const { return store_->waits_since(); }
  const void* connection() const { return store_->connection(); }  // see Store

 private:
  void keep_first(const std::string& key, int64_t number, const std::string& rest,
                  bool (*before)(int64_t, int64_t));

  const std::shared_ptr<BoardStore> store_;
};

}  // namespace meshcast
