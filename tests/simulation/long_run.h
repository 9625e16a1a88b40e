#pragma once

#include <cstdint>
#include <string>

namespace meshcast::simulation {

// Of a program that is not drawn, but large: what was measured, and which limit that misses ("": none).
struct Measured {
  std::string text;
  std::string violation;
};

// Ranks that make a first call, then one that takes five seconds, then one that a rank does not come to.
Measured run_crowd(int ranks);

// A job of three ranks in which every other call is refused, so that the group has so many generations: neither
// its keys nor its memory grow.
Measured run_generations(int64_t generations);

}  // namespace meshcast::simulation
