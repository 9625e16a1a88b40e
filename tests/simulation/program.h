#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace meshcast::simulation {

// What one rank does in one call.
struct Act {
  enum class Kind : uint8_t {
    Calls,
    OtherArguments,  // calls with a plan of its own
    Refuses,         // finds its own arguments wrong before the call
    RefusesToStart,  // finds its tensors wrong once the ranks have agreed
    NeverComes,      // nor to any later call
    RefusesUnread    // the same as Refuses, but it cannot read which group the call is of
  };
  Kind kind = Kind::Calls;
  int64_t late = 0;   // microseconds before the call
  bool waits = true;  // at once; else at the end of the program

  friend bool operator==(const Act&, const Act&) = default;
};

struct Call {
  int plan = 0;  // of the program; calls with one plan agree once
  double limit = 0;
  std::vector<Act> acts;  // by rank
};

// Beside the group of all ranks, one of the first two, in the same process group: prepared before all calls,
// and never called.
struct Wing {
  bool is_there = false;
  int refuser = -1;  // refuses to prepare it, without knowing the group; then both prepare it once more

  int64_t late = 0;  // microseconds, of the other one

  static constexpr int kRanks = 2;
};

constexpr double kLongLimit = 8;  // seconds

// What happens besides, at a moment of virtual time.
struct Fault {
  enum class Kind : uint8_t {
    Kill,
    Freeze,
    Cut,
    CutUnseen,
    StoreSlow,
    StoreFrozen,
    StoreDead,
    Abort,
    Close,
    Hang,
    StoreEmptied,  // it is started again, and has lost all
    HalfOpen,      // nothing passes from the rank to the other, which does not see that
    Interrupt      // a handler of a signal raises in the rank's main thread
  };
  Kind kind = Kind::Kill;
  int64_t at = 0;  // microseconds
  int rank = 0;
  int other = 0;      // of a cut
  int64_t lasts = 0;  // microseconds: a frozen rank or store, a slow store, requests that hang although they
                      // were aborted; of a death or cut, until it is seen
};

// A call beside those, which all ranks make alike: in a lane that has a thread of its own, or in a callback of
// the one before it there.
struct Side {
  int32_t lane = 2;
  int plan = 0;
  double limit = 0;
  bool called_back = false;
  int64_t late = 0;  // microseconds, of rank 1
};

struct Program {
  uint64_t seed = 0;
  int ranks = 0;
  size_t kept = 256;       // agreements that a group remembers
  bool joined = false;     // each plan moves something between each rank and all others
  bool tells = true;       // the network says why a peer has left, and whether one is lost
  bool backwards = false;  // in the end each rank makes those of its calls that succeeded
  bool again = false;      // once all have left the group they make another, of the same name in the same store
  Wing wing;
  std::vector<Call> calls;
  std::vector<Side> sides;
  std::vector<Fault> faults;
};

const char* name_of(Act::Kind kind);

Program draw_program(uint64_t seed);
std::string describe(const Program& program);
// What was drawn: "cut", "refuses", ..., or "nothing". Sorted, each once.
std::vector<std::string> kinds_of(const Program& program);

// What came of a program.
struct Outcome {
  std::string violation;                // of a property; empty: it has them all
  std::map<std::string, int64_t> ends;  // calls by how they ended
  std::vector<std::string> calls;       // each with when and how, by rank
  uint64_t hand_overs = 0;
  uint64_t requests = 0;  // to the store
  double seconds = 0;     // of virtual time
};

// Runs it and looks whether: no call outlives its limit by more than a few seconds; a rank whose call succeeded
// has the bytes of the oracle; an error has a type and names a rank that what was drawn explains; a program
// without faults, in which all ranks call alike, succeeds; no message, thread or lock is left.
Outcome run_program(const Program& program);

}  // namespace meshcast::simulation
