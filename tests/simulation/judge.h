#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/sync.h"
#include "group/record.h"
#include "simulation/program.h"

namespace meshcast::simulation {

// How one call of one rank ended.
struct Ending {
  bool done = false;
  std::optional<ErrorKind> error;
  int32_t peer = -1;
  std::string text;
  Clock::duration begun{};
  Clock::duration at{};
  double ran = 0;  // seconds since it was started; 0 if that never came
};

std::string line_of(int rank, size_t call, const Ending& each);
std::string text_of(const Ending& each);  // its kind of error, or "success"

// That a rank has waited for long.
struct Noticed {
  LongWait wait;
  Clock::duration at{};
};

// Seconds after which a wait is worth a notice in a simulation.
inline constexpr double kLongWait = 0.5;

// What came of a program, for its judge.
struct Findings {
  std::vector<std::vector<Ending>> endings;    // by rank and call
  std::vector<std::vector<Ending>> beside;     // of sides, backwards by call, the wing, the second group
  std::map<int, Clock::duration> left_at;      // when a rank had made its calls
  std::map<int, Clock::duration> interrupted;  // when a wait of a rank was ended by a signal
  std::vector<Noticed> noticed;
  std::set<int> joined;     // ranks that have met others
  Clock::duration ended{};  // when the last of them was through
  uint64_t requests = 0;    // to the store
  size_t keys = 0;          // that are left in it
  size_t meetings = 0;      // of those, what says that a rank waits to meet others
};

// Throws Violation where a property does not hold.
void judge(const Program& program, const Findings& found);

}  // namespace meshcast::simulation
