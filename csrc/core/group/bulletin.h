#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "group/store.h"
#include "transport/transport.h"

namespace meshcast {

// What a rank says about one call of one lane: what it called, or that it refused its own arguments.
struct Posting {
  bool rejected = false;
  int32_t slot = -1;  // number the group's first rank gives to this descriptor; -1 from the others
  std::string text;   // descriptor, or the reason of the rejection
};

// Why the group is broken, as told by the rank that saw it first.
struct Cause {
  int32_t kind = 0;       // ErrorKind
  int32_t reporter = -1;  // global ranks
  int32_t peer = -1;
  std::string text;
};

// Whom an error of `rank` names: the rank that was lost, or that gave up, unless that is itself; -1: nobody.
inline int32_t peer_in(const Cause& cause, int32_t rank) {
  const bool gave_up = cause.kind == static_cast<int32_t>(ErrorKind::Aborted) && cause.reporter != rank;
  return cause.peer < 0 && gave_up ? cause.reporter : cause.peer;
}

// As text, for the store and for peers; bounded. What cannot be read is a cause without a kind.
std::string encode(const Cause& cause);
Cause decode_cause(const std::string& text);

// The group's notice board in the rendezvous store: postings by (lane, ordinal, rank) and one first cause.
// Plain text, bounded, nothing executed. Every call throws what the store throws.
class Bulletin {
 public:
  explicit Bulletin(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  // Two boards: what a rank asks the others to agree on, and that it stands still in a call. A rank that froze
  // after agreeing has a notice on the first and none on the second.
  enum class Board : uint8_t { Agreement, Stall };

  void post(Board board, int32_t lane, int64_t ordinal, int32_t rank, const Posting& posting);
  std::optional<Posting> read(Board board, int32_t lane, int64_t ordinal, int32_t rank);
  void erase(Board board, int32_t lane, int64_t ordinal, int32_t rank);

  // How many ranks have posted a text for a call on the board of agreements: one question, however many they
  // are. count: this rank has just done so. Texts go by their digest.
  int64_t count(int32_t lane, int64_t ordinal, const std::string& digest);
  int64_t counted(int32_t lane, int64_t ordinal, const std::string& digest);
  void erase_count(int32_t lane, int64_t ordinal, const std::string& digest);

  // That this rank's postings for calls of a lane up to this one are gone: it has left those calls.
  void pass(int32_t lane, int64_t ordinal, int32_t rank);
  int64_t passed(int32_t lane, int32_t rank);  // -1: none

  // Of a call that a rank refused: the word that counts, this one or that which another rank wrote before.
  std::string decide(int32_t lane, int64_t ordinal, const std::string& word);
  void erase_decision(int32_t lane, int64_t ordinal);

  // That this rank has refused a call, and takes part in none from there on to a later one which another rank
  // refused before that was known.
  void leave_at(int32_t lane, int64_t ordinal, int32_t rank, const std::string& why);
  std::optional<std::pair<int64_t, std::string>> left_at(int32_t lane, int32_t rank);

  // The oldest call of a lane that this rank has been in for long.
  void wait_in(int32_t lane, int64_t ordinal, int32_t rank);
  int64_t waits_in(int32_t lane, int32_t rank);  // the last that it told; -1: none

  // Returns the cause that counts: this one, or the one that another rank wrote before.
  Cause settle_cause(const Cause& cause);
  std::optional<Cause> read_cause();

  // Since when a call has been waiting for the store; TimePoint() while none does. Of a bulletin that one
  // thread at a time uses.
  TimePoint waits_since() const { return waits_since_; }

  const void* connection() const { return store_->connection(); }  // see Store

 private:
  class Wait;

  std::optional<std::string> read_key(const std::string& key);
  int64_t read_ordinal(const std::string& key);  // -1: none

  const std::shared_ptr<Store> store_;
  std::atomic<TimePoint> waits_since_{TimePoint()};
};

}  // namespace meshcast
