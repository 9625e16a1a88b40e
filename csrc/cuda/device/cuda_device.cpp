#include "cuda/device/cuda_device.h"

#include <tuple>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda/device/cuda_call.h"

namespace meshcast {
namespace {

// Calls `launch(begin, end)` for each longest range of equal keys.
template <class Item, class Key, class Launch>
void by_key(std::span<const Item> items, const Key& key, const Launch& launch) {
  for (size_t begin = 0; begin < items.size();) {
    size_t end = begin + 1;
    while (end < items.size() && key(items[end]) == key(items[begin])) ++end;
    launch(items.subspan(begin, end - begin));
    begin = end;
  }
}

}  // namespace

CudaDevice::CudaDevice(int device) : device_(device) {
  const OnDevice here(device_);
  check_cuda(cudaDeviceGetAttribute(&most_pitch_, cudaDevAttrMaxPitch, device_),
             "asking for the largest pitch of copies", device_);
  kernels_ = make_stream();
  transfer_ = make_stream();
}

CudaDevice::~CudaDevice() {
  try {
    const OnDevice here(device_);
    gates_.insert(gates_.end(), {kernels_, transfer_});
    for (cudaStream_t stream : gates_)
      if (stream != nullptr) let_go(cudaStreamDestroy(stream));
  } catch (const std::exception&) {
    // CUDA has ended, and its streams with it.
  }
}

cudaStream_t CudaDevice::make_stream() const {
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for the priorities of streams",
             device_);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "making a stream",
             device_);
  return stream;
}

CudaDevice::Gate::Gate(std::shared_ptr<CudaDevice> device, cudaStream_t stream)
    : device_(std::move(device)), stream_(stream) {}

CudaDevice::Gate::~Gate() {
  const std::lock_guard lock(device_->gates_mutex_);
  device_->spare_gates_.push_back(stream_);
}

RoundDevice::Stream CudaDevice::Gate::stream() const { return handle_of(stream_); }

std::shared_ptr<CudaDevice::Gate> CudaDevice::take_gate(const std::shared_ptr<CudaDevice>& device) {
  cudaStream_t stream = nullptr;
  {
    const std::lock_guard lock(device->gates_mutex_);
    if (device->spare_gates_.empty()) {
      const OnDevice here(device->device_);
      device->gates_.push_back(device->make_stream());
      device->spare_gates_.push_back(device->gates_.back());
    }
    stream = device->spare_gates_.back();
    device->spare_gates_.pop_back();
  }
  return std::make_shared<Gate>(device, stream);
}

RoundDevice::Stream CudaDevice::kernel_stream() { return handle_of(kernels_); }
RoundDevice::Stream CudaDevice::transfer_stream() { return handle_of(transfer_); }

RoundDevice::Event CudaDevice::make_event() {
  const OnDevice here(device_);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event", device_);
  return handle_of(event);
}

void CudaDevice::free_event(Event event) noexcept { destroy_event(event, device_); }

void CudaDevice::record(Event event, Stream stream) {
  const OnDevice here(device_);
  check_cuda(cudaEventRecord(event_of(event), stream_of(stream)), "recording an event", device_);
}

void CudaDevice::wait(Stream stream, Event event) {
  const OnDevice here(device_);
  check_cuda(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "ordering a stream", device_);
}

bool CudaDevice::reached(Event event) {
  const OnDevice here(device_);
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();  // else the next check of other code would find it
    return false;
  }
  check_cuda(status, "work that was enqueued before", device_);
  return true;
}

std::shared_ptr<std::byte> CudaDevice::allocate(int64_t nbytes) {
  const OnDevice here(device_);
  void* memory = nullptr;
  try {
    memory = c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(static_cast<size_t>(nbytes), kernels_);
  } catch (const std::exception& error) {
    throw Error(ErrorKind::Generic,
                fmt::format("no {} bytes of staging on CUDA device {}: {}", nbytes, device_, error.what()));
  }
  return {static_cast<std::byte*>(memory),
          [](std::byte* data) { c10::cuda::CUDACachingAllocator::raw_delete(data); }};
}

cuda::Target CudaDevice::target(Stream stream) const {
  cuda::Target out;
  out.device = device_;
  out.stream = stream_of(stream);
  out.most_pitch = most_pitch_;
  return out;
}

void CudaDevice::move_boxes(Stream stream, std::span<const BoxMove> boxes) {
  const OnDevice here(device_);
  // A copy takes any type: only those that differ matter.
  const auto key = [](const BoxMove& box) {
    const bool casts = box.from_type != box.to_type;
    return casts ? std::pair{box.from_type, box.to_type} : std::pair{ElementType::None, ElementType::None};
  };
  by_key(boxes, key, [&](std::span<const BoxMove> alike) {
    pairs_.clear();
    for (const BoxMove& box : alike) pairs_.push_back({box.from, box.to});
    const BoxMove& first = alike.front();
    if (first.from_type == first.to_type)
      cuda::copy_boxes(pairs_, target(stream));
    else
      cuda::cast_boxes(pairs_, first.from_type, first.to_type, target(stream));
  });
}

void CudaDevice::reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) {
  const OnDevice here(device_);
  const auto key = [](const BoxReduce& box) { return std::tuple{box.type, box.op, box.divisor}; };
  by_key(boxes, key, [&](std::span<const BoxReduce> alike) {
    pairs_.clear();
    views_.clear();
    for (const BoxReduce& box : alike) {
      views_.push_back(packed_like(box.own, box.carried));
      pairs_.push_back({box.own, views_.back()});
    }
    const BoxReduce& first = alike.front();
    cuda::reduce_boxes(pairs_, first.type, first.op, target(stream));
    if (first.divisor > 1) cuda::divide_boxes(views_, first.type, first.divisor, target(stream));
  });
}

}  // namespace meshcast
