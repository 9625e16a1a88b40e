#pragma once

#include <cstdint>

namespace meshcast {

// Bytes of shared memory that this process may make, without control data. Takes effect from now on.
void set_shm_budget(int64_t nbytes);

// A part of them, for its lifetime. Each share takes a part of the rest of the budget, so that later ones get
// less, not none. Throws std::runtime_error if the rest is too small to be of use.
class ShmShare {
 public:
  ShmShare() = default;
  static ShmShare of_group(int64_t unit);  // for the ranks of a private group
  static ShmShare of_pair(int64_t unit);   // for messages to one rank; leaves a quarter of all to groups
  ~ShmShare();
  ShmShare(ShmShare&& other) noexcept;
  ShmShare& operator=(ShmShare&& other) noexcept;

  int64_t nbytes() const { return nbytes_; }  // a multiple of `unit`

 private:
  explicit ShmShare(int64_t nbytes) : nbytes_(nbytes) {}

  int64_t nbytes_ = 0;
};

}  // namespace meshcast
