#pragma once

// Named points at which a test makes its process fail (tests/fault). Only builds with MESHCAST_FAULT_POINTS,
// which are not released, have them; elsewhere nothing is compiled.
#if MESHCAST_FAULT_POINTS

#include <cstdint>
#include <map>
#include <string>

#define MC_FAULT_POINT(name) ::meshcast::fault_point("fault point " name)

namespace meshcast {

void fault_point(const char* name);

// "POINT COUNT ACTION [SECONDS [PATH [PORT]]]": at the COUNT-th pass from now on, 0 for each. The text in the
// variable MESHCAST_FAULT is armed when the first point is passed. The time of the fault, by the monotonic
// clock, is written to PATH. Actions:
//   kill, stop   the signal                   throw  std::bad_alloc
//   exit         status 1, at once            sleep  SECONDS, in the thread that passes
//   abort        as a failed assertion does
//   reset, half  of every TCP connection but those with PORT: its end by RST, or of what is sent
void arm_fault(const std::string& text);
std::map<std::string, int64_t> fault_points_passed();  // how often each, so far

}  // namespace meshcast

#else
#define MC_FAULT_POINT(name) static_cast<void>(0)
#endif
