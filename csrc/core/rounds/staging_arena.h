#pragma once

#include <cstdint>
#include <vector>

namespace meshcast {

// The work that has to be over before memory may be written again. -1: none.
struct LastUse {
  int32_t exchange = -1;  // number of the rank's exchange
  int32_t mark = -1;      // position on its kernel stream
};

// Gives out staging for a span of time, before anything runs: the same memory serves many messages, and take()
// returns its previous use. Times ascend from call to call.
class StagingArena {
 public:
  struct Buffer {
    int64_t offset = 0;
    LastUse before;
  };

  // For the times first..last, both included.
  Buffer take(int64_t nbytes, int32_t first, int32_t last);

  // Sets the last use of the buffer at `offset`, known once it is scheduled.
  void used(int64_t offset, LastUse use);

  int64_t size() const { return size_; }

 private:
  struct Block {
    int64_t offset = 0;
    int64_t nbytes = 0;
    int32_t last = 0;
    LastUse use;
  };

  std::vector<Block> live_;  // by offset, apart from one another
  std::vector<Block> past_;  // whose memory has not been taken since
  int64_t size_ = 0;
};

}  // namespace meshcast
