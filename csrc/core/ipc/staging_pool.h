#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <vector>

#include "common/error.h"
#include "ipc/ipc_link.h"

namespace meshcast {

// Memory of one GPU that other processes can map: the staging of all lanes and groups of a process. A block
// that was given back serves the next request. To free what another process has mapped is undefined, and a free
// may wait for all that runs on the GPU; so spare blocks return to the GPU only where a request would exceed
// the limit, or in trim(), and only while no other process may have them mapped. Thread-safe; calls of `Memory`
// are made by one thread at a time, and frees without a lock.
class StagingPool {
 public:
  struct Memory {
    std::function<std::byte*(int64_t nbytes)> allocate;  // throws Error
    std::function<void(std::byte*)> free;
  };
  // Bytes, apart from the counts. limit: of in_use and spare together; 0: none.
  struct Figures {
    int64_t limit = 0;
    int64_t in_use = 0;
    int64_t spare = 0;
    int64_t peak = 0;         // of in_use
    int64_t allocations = 0;  // of the GPU
    int64_t returned = 0;     // blocks, to the GPU
  };

  explicit StagingPool(Memory memory) : memory_(std::move(memory)) {}

  void limit_to(int64_t nbytes);
  // Throws Error beyond the limit, or where the GPU has no more.
  std::byte* take(int64_t nbytes);
  void give(std::byte* data);

  // One more process, or one fewer, may have a block mapped. Returns whether there is a block: other addresses
  // are ignored, but may be those of blocks later.
  bool show(const std::byte* base);
  void hide(const std::byte* base);
  // A peer that still has blocks mapped, at the end of a connection. They are until its last note has come, or
  // it has ended.
  void part(IpcLink link, std::vector<const std::byte*> bases);

  // Returns all spare blocks to the GPU that no peer has mapped, if none is in use.
  void trim();
  Figures figures() const;

 private:
  struct Block {
    int64_t nbytes = 0;
    bool spare = false;
    int shown = 0;
  };
  struct Parted {
    IpcLink link;
    std::vector<const std::byte*> bases;
  };
  using Blocks = std::map<const std::byte*, Block>;

  Error beyond_limit(int64_t nbytes) const;
  void hide_locked(const std::byte* base);
  void hear_parted();
  Blocks::iterator spare_of(int64_t least, int64_t most);
  std::vector<std::byte*> take_out(int64_t nbytes);
  void free_all(const std::vector<std::byte*>& blocks);

  const Memory memory_;
  std::mutex calls_;  // of memory_.allocate; before mutex_
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::list<Parted> parted_;
  Figures figures_;
};

}  // namespace meshcast
