#pragma once

#include <functional>
#include <future>
#include <memory>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "cuda/device/cuda_device.h"
#include "cuda/device/nccl_library.h"
#include "transport/transport.h"

namespace meshcast {

// The ranks that make a communicator, as NCCL counts them. blocks: the most that a kernel of it may have; the
// same on all ranks.
struct NcclMeeting {
  ncclUniqueId id{};
  int ranks = 0;
  int rank = 0;
  int blocks = 0;
};

// The multiprocessors of a GPU that no communicator of this process counts on. A kernel of NCCL occupies one
// for each of its blocks while it waits for other ranks. Two ranks may launch those of two communicators in
// opposite orders, and no order would do for all programs: so all of them have to fit on the GPU at once.
int nccl_blocks_left(int device);

// One GPU and one communicator of NCCL of its own.
class NcclDevice final : public CudaDevice {
 public:
  // Makes the communicator, on GPU `device`, with all ranks of the meeting. Waits for them until `deadline`,
  // and calls `checkpoint` every few milliseconds, which throws where the group has been given up. Throws
  // Error.
  static std::shared_ptr<NcclDevice> connect(const NcclMeeting& meeting, int device, TimePoint deadline,
                                             const std::function<void()>& checkpoint);
  ~NcclDevice() override;

  void close() noexcept override;
  bool reached(Event event) override;

  GroupOutcome group_start() override;
  GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override;
  GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override;
  GroupOutcome group_end() override;
  GroupOutcome async_error() override;
  void abort() noexcept override;

 private:
  NcclDevice(const NcclLibrary& nccl, int device, int blocks);
  void meet(const NcclMeeting& meeting, ncclConfig_t* config, TimePoint deadline,
            const std::function<void()>& checkpoint);

  bool flush() noexcept;

  const NcclLibrary& nccl_;
  const int blocks_;
  ncclComm_t comm_ = nullptr;  // null once it has been aborted
  std::future<void> aborted_;  // valid while it is, on a thread of its own
};

}  // namespace meshcast
