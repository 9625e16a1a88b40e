#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/sync.h"
#include "ipc/ipc_driver.h"

namespace meshcast {

// Shows whether processes can open each other's memory and events before a group relies on it. A driver exports
// both in any container, but opens only those of processes in the same namespaces. Every rank makes a proof,
// gives its card to the others and checks theirs; it keeps its proof until they have done so. On the transfer
// stream of `device`, which outlives this as `driver` does. Calls of CUDA that fail while it is made throw
// Error.
class IpcProof {
 public:
  IpcProof(IpcDriver& driver, RoundDevice& device);
  ~IpcProof();
  IpcProof(const IpcProof&) = delete;
  IpcProof& operator=(const IpcProof&) = delete;

  const std::string& card() const { return card_; }

  // Opens the memory and the event of another rank's card, copies its mark from there, and closes the memory.
  // Returns why that is impossible; empty where it works.
  std::string check(const std::string& card, TimePoint deadline);

 private:
  std::string read(const std::string& card, TimePoint deadline);

  IpcDriver& driver_;
  RoundDevice& device_;
  std::shared_ptr<std::byte> memory_;
  std::shared_ptr<uint64_t> mark_;  // the GPU may read it until `written_`
  RoundDevice::Event written_ = 0;
  std::string card_;
};

}  // namespace meshcast
