#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "rounds/device.h"

namespace meshcast {

// CUDA's handle of memory, or of an event, for another process; both are of this size.
using IpcHandle = std::array<std::byte, 64>;

// An allocation that other processes can map. `id` is never used twice in a process, as addresses are.
struct IpcRange {
  std::byte* base = nullptr;
  int64_t nbytes = 0;
  uint64_t id = 0;
};

class IpcMappings;
class StagingPool;

// The functions of CUDA that groups over CUDA IPC need in addition to a RoundDevice, on its GPU. The
// RoundDevice records, awaits, queries and frees events, whether made here or opened: a wait is for what had
// been recorded when it was enqueued, also where another process recorded it. Calls that fail throw Error. No
// two threads are inside at a time.
class IpcDriver {
 public:
  using Stream = RoundDevice::Stream;
  using Event = RoundDevice::Event;

  virtual ~IpcDriver() = default;

  // The allocation that holds `data`, or nothing where no other process can map it.
  virtual std::optional<IpcRange> exportable(const std::byte* data) = 0;
  // None if CUDA still refuses, such as for memory that another process has shared with this one.
  virtual std::optional<IpcHandle> export_memory(const IpcRange& range) = 0;
  // The address at which the other process's allocation is mapped here; null while this process has mapped an
  // earlier allocation at the same address of the other. To be closed when nothing on the GPU uses it any
  // longer.
  virtual std::byte* open_memory(const IpcHandle& handle) = 0;
  virtual void close_memory(std::byte* base) noexcept = 0;  // from any thread
  virtual IpcMappings& mappings() = 0;                      // one for this process and GPU
  virtual StagingPool& staging() = 0;                       // the same
  // Always exportable; a released block serves the next request.
  virtual std::shared_ptr<std::byte> allocate_exportable(int64_t nbytes) = 0;

  virtual Event make_ipc_event(IpcHandle* handle) = 0;
  virtual Event open_event(const IpcHandle& handle) = 0;

  // Enqueues and returns at once.
  virtual void copy(Stream stream, std::byte* to, const std::byte* from, int64_t nbytes) = 0;
};

}  // namespace meshcast
