#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda/kernels/launch.h"
#include "rounds/device.h"

namespace meshcast {

// The common part of every RoundDevice on a real GPU: streams and events of its own, kernels, staging from
// torch's allocator, so that torch knows of it. A transport adds the groups.
class CudaDevice : public RoundDevice {
 public:
  ~CudaDevice() override;

  int device() const { return device_; }

  // Ends the connections to other ranks; nothing of the transport is called afterwards. Accepted messages still
  // arrive, if the other ranks close theirs soon.
  virtual void close() noexcept = 0;

  // A stream that stands for the caller of one run: behind what the user's stream held when the call was made,
  // yet later work of the user waits for the run only when requested. It belongs to the run alone until this is
  // dropped, which is done when the GPU is done with the run. Outlives the device if need be.
  class Gate {
   public:
    Gate(std::shared_ptr<CudaDevice> device, cudaStream_t stream);
    ~Gate();
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;

    Stream stream() const;

   private:
    const std::shared_ptr<CudaDevice> device_;
    const cudaStream_t stream_;
  };
  static std::shared_ptr<Gate> take_gate(const std::shared_ptr<CudaDevice>& device);

  Stream kernel_stream() override;
  Stream transfer_stream() override;
  Event make_event() override;
  void free_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool reached(Event event) override;
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override;
  void move_boxes(Stream stream, std::span<const BoxMove> boxes) override;
  void reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) override;

 protected:
  explicit CudaDevice(int device);

 private:
  cudaStream_t make_stream() const;
  cuda::Target target(Stream stream) const;

  const int device_;
  cudaStream_t kernels_ = nullptr;
  cudaStream_t transfer_ = nullptr;
  int most_pitch_ = 0;
  std::mutex gates_mutex_;  // gates come and go in any thread
  std::vector<cudaStream_t> spare_gates_;
  std::vector<cudaStream_t> gates_;   // all of them
  std::vector<cuda::BoxPair> pairs_;  // of one launch; kept for their memory
  std::vector<StridedView> views_;
};

}  // namespace meshcast
