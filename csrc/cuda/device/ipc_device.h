#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device/cuda_device.h"
#include "ipc/ipc_exchange.h"
#include "ipc/ipc_proof.h"
#include "ipc/staging_pool.h"
#include "rounds/round_table.h"

namespace meshcast {

// The calls of CUDA behind IpcExchange that are not those of any RoundDevice, for one GPU.
class CudaIpcDriver final : public IpcDriver {
 public:
  explicit CudaIpcDriver(int device);

  std::optional<IpcRange> exportable(const std::byte* data) override;
  std::optional<IpcHandle> export_memory(const IpcRange& range) override;
  std::byte* open_memory(const IpcHandle& handle) override;
  void close_memory(std::byte* base) noexcept override;
  IpcMappings& mappings() override;
  StagingPool& staging() override;
  std::shared_ptr<std::byte> allocate_exportable(int64_t nbytes) override;

  Event make_ipc_event(IpcHandle* handle) override;
  Event open_event(const IpcHandle& handle) override;

  void copy(Stream stream, std::byte* to, const std::byte* from, int64_t nbytes) override;

 private:
  class Pool;

  const int device_;
  Pool& pool_;
};

// One GPU, and copies between its memory and that of the other ranks of the host, made by CUDA and not by NCCL.
// Staging is exportable memory of its own.
class IpcDevice final : public CudaDevice {
 public:
  // Connects with all other ranks, as IpcMeeting::meet. Throws Error.
  static std::shared_ptr<IpcDevice> connect(IpcMeeting& meeting, const std::vector<std::string>& addresses,
                                            int32_t rank, int device, TimePoint deadline,
                                            const std::function<void()>& checkpoint);
  // Of GPU `device` alone. Throws Error.
  static std::shared_ptr<IpcProof> prove(int device);
  ~IpcDevice() override;

  void close() noexcept override;

  const char* transport() const override { return "cuda_ipc"; }
  bool meets_hosts() const override { return true; }
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override;
  void retire(const std::byte* staging) override;
  bool rest() override;
  GroupOutcome group_start() override;
  GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override;
  GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override;
  GroupOutcome group_end() override;
  GroupOutcome async_error() override;
  void abort() noexcept override;

 private:
  explicit IpcDevice(int device) : CudaDevice(device), driver_(device) {}

  CudaIpcDriver driver_;
  std::unique_ptr<IpcExchange> groups_;  // null where the device is only that of a proof
};

// How plans are cut into rounds for it. `known`: as for NCCL. Where it has no rate of links, that of copies
// inside a GPU is guessed: fewer and larger rounds than for NCCL, since the hosts of all ranks of a round have
// to meet.
RoundOptions ipc_round_options(RoundOptions known);

// The staging of this process on GPU `device` over CUDA IPC.
StagingPool& ipc_staging(int device);

// Why this process cannot use CUDA IPC on GPU `device`, with what to do; empty where it can. Tries it.
std::string cuda_ipc_obstacle(int device);

}  // namespace meshcast
