#pragma once

#include <cstdint>

namespace meshcast {

// Bytes of shared memory that this process may make, without what controls them. Counts from now on.
void set_shm_budget(int64_t nbytes);

// A part of them, from its making to its end. Many share the budget: each takes a part of what is left, so that
// later ones get less, not none. Throws std::runtime_error where what is left is too little to be of use.
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
