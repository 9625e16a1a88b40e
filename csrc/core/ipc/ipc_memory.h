#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "ipc/ipc_driver.h"

namespace meshcast {

// The allocations of this rank that its peers may have mapped. They are numbered, since an address may come
// back as another allocation: that one gets a new number, and the earlier one is forgotten.
class IpcExports {
 public:
  struct Place {
    uint64_t memory = 0;
    int64_t offset = 0;
  };
  struct Entry {
    IpcRange range;
    IpcHandle handle{};
    uint64_t used = 0;
  };

  explicit IpcExports(IpcDriver& driver) : driver_(driver) {}

  // The place of `data`, or none if it cannot be exported. `now` grows from group to group: entries that were
  // used in the present one stay.
  std::optional<Place> find(const std::byte* data, uint64_t now);
  const Entry& entry(uint64_t memory) const { return entries_.at(memory); }
  std::vector<uint64_t> take_forgotten() { return std::exchange(forgotten_, {}); }
  void forget_at(const std::byte* base);  // the allocation that begins there, if it is known

  // Memory that a peer has mapped does not go back to the GPU, even if the owner has freed it.
  static constexpr size_t kMost = 64;

 private:
  void forget(uint64_t memory);
  void forget_overlapped(const IpcRange& range);

  IpcDriver& driver_;
  std::map<uint64_t, Entry> entries_;  // whose ranges are apart
  std::map<const std::byte*, uint64_t> by_base_;
  std::vector<uint64_t> forgotten_;
  std::set<uint64_t> refused_;  // allocations by the driver's number; asked for again now and then
  uint64_t next_ = 1;
};

class IpcImports;

// All imports of a process on one GPU, whichever lane or group they are of. CUDA refuses to map an address of
// another process while an earlier allocation at it is mapped ("already mapped"), and the lane that has it
// mapped may never learn that it was freed. Thread-safe.
class IpcMappings {
 public:
  void add(IpcImports* imports);
  void remove(IpcImports* imports);
  // Closes the memory that the others have mapped and the GPU is done with; they map it again when they need
  // it. Returns whether some of it had to stay.
  bool close_others(const IpcImports* imports);

 private:
  std::mutex mutex_;
  std::set<IpcImports*> all_;
};

// The allocations of one peer. They are mapped when first needed, and stay so until another lane has to map
// another allocation at their address.
class IpcImports {
 public:
  IpcImports(IpcDriver& driver, RoundDevice& device) : driver_(driver), device_(device) {
    driver_.mappings().add(this);
  }
  ~IpcImports() { leave(); }
  IpcImports(const IpcImports&) = delete;
  IpcImports& operator=(const IpcImports&) = delete;

  void add(uint64_t memory, const IpcHandle& handle, int64_t nbytes);
  // Null while it has to be mapped first and forgotten memory, or memory that another lane still uses, is not
  // closed yet: that may have had this address. The returned memory stays mapped until used_until(). Throws
  // Error where the peer has named no such memory.
  const std::byte* at(uint64_t memory, int64_t offset, int64_t nbytes);
  // `event` has been recorded behind all uses of what at() returned.
  void used_until(RoundDevice::Event event);
  void forget(uint64_t memory);  // closes it later, when the transfer stream has passed what used it
  void sweep();                  // does so
  std::vector<uint64_t> take_closed() { return std::exchange(closed_, {}); }  // forgotten, and not mapped
  void close_all();                                  // nothing on the GPU uses any of it
  bool close_idle();                                 // from any thread: see IpcMappings
  void leave() { driver_.mappings().remove(this); }  // no other thread is here any longer

 private:
  enum class Opened : uint8_t { Yes, Later, Refused };
  struct Entry;
  Opened open(Entry* entry);
  void sweep_locked();

  struct Entry {
    IpcHandle handle{};
    int64_t nbytes = 0;
    std::byte* base = nullptr;  // null until it is mapped
  };
  struct Closing {
    std::byte* base = nullptr;
    RoundDevice::Event passed = 0;
    uint64_t memory = 0;
  };

  IpcDriver& driver_;
  RoundDevice& device_;
  // Entries come and go in the lane's thread alone; what is mapped is guarded, since others may close it.
  std::map<uint64_t, Entry> entries_;
  std::mutex mutex_;
  std::vector<Closing> closing_;
  std::vector<uint64_t> closed_;
  bool in_use_ = false;           // at() was called after the last used_until()
  RoundDevice::Event until_ = 0;  // of that
};

}  // namespace meshcast
