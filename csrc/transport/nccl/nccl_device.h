#pragma once

#include <array>
#include <functional>
#include <future>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "cuda/launch.h"
#include "exec/rounds/device.h"
#include "transport/nccl/nccl_library.h"
#include "transport/transport.h"

namespace meshcast {

// Everybody who takes part in making a communicator, as NCCL counts them.
struct NcclMeeting {
  ncclUniqueId id{};
  int ranks = 0;
  int rank = 0;
};

// The real RoundDevice: one GPU and one communicator of its own. Streams and events are its own as well;
// staging comes from torch's allocator, so that torch knows of it.
class NcclDevice final : public RoundDevice {
 public:
  // Makes the communicator, on GPU `device`, with all ranks of the meeting. Waits for them until `deadline`,
  // and calls `checkpoint` every few milliseconds, which throws where the group has been given up. Throws
  // Error.
  static std::shared_ptr<NcclDevice> connect(const NcclMeeting& meeting, int device, TimePoint deadline,
                                             const std::function<void()>& checkpoint);
  ~NcclDevice() override;

  int device() const { return device_; }

  // Ends the communicator; nothing of NCCL is called afterwards. What it has accepted still arrives, if the
  // other ranks close theirs soon.
  void close() noexcept;

  // A stream that stands for the caller of a run: behind what the user's stream held when the call was made,
  // yet nothing that the user enqueues later waits for the run before it is asked to.
  Stream next_gate();

  Stream kernel_stream() override { return handle(kernels_); }
  Stream transfer_stream() override { return handle(transfer_); }
  Event make_event() override;
  void free_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool reached(Event event) override;
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override;
  void move_boxes(Stream stream, std::span<const BoxMove> boxes) override;
  void reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) override;
  GroupOutcome group_start() override;
  GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override;
  GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override;
  GroupOutcome group_end() override;
  GroupOutcome async_error() override;
  void abort() noexcept override;

 private:
  NcclDevice(const NcclLibrary& nccl, int device);
  void meet(const NcclMeeting& meeting, ncclConfig_t* config, TimePoint deadline,
            const std::function<void()>& checkpoint);

  template <class Handle>
  static std::uintptr_t handle(Handle pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }
  cudaStream_t make_stream() const;
  cuda::Target target(Stream stream) const;
  bool flush() noexcept;

  const NcclLibrary& nccl_;
  const int device_;
  ncclComm_t comm_ = nullptr;  // null once it has been aborted
  std::future<void> aborted_;  // valid while it is, on a thread of its own
  cudaStream_t kernels_ = nullptr;
  cudaStream_t transfer_ = nullptr;
  std::array<cudaStream_t, 4> gates_{};
  size_t gate_ = 0;
  std::vector<cuda::BoxPair> pairs_;  // of one launch; kept for their memory
  std::vector<StridedView> views_;
};

}  // namespace meshcast
