#include "transport/nccl/nccl_device.h"

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

constexpr auto kPause = std::chrono::milliseconds(1);  // between two looks at a communicator that is being made
constexpr auto kFlushLimit = std::chrono::seconds(2);  // for what NCCL still has to pass on when a group closes
constexpr auto kAbortLimit = std::chrono::seconds(5);  // an abort that hangs is left behind, see abort()

// For the calls of one scope: the GPU, and leave to make them while another thread captures a CUDA graph.
class OnDevice {
 public:
  explicit OnDevice(int device)
      : guard_(static_cast<c10::DeviceIndex>(device)), mode_(cudaStreamCaptureModeThreadLocal) {}

 private:
  const c10::cuda::CUDAGuard guard_;
  const c10::cuda::CUDAStreamCaptureModeGuard mode_;
};

void check(cudaError_t status, const char* what, int device) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::Generic, fmt::format("{} on CUDA device {} failed: {} ({})", what, device,
                                              cudaGetErrorName(status), cudaGetErrorString(status)));
}

cudaStream_t stream_of(RoundDevice::Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(RoundDevice::Event event) { return reinterpret_cast<cudaEvent_t>(event); }

cuda::CastType cast_type(ElementType type) {
  switch (type) {
    case ElementType::Float32: return cuda::CastType::Float32;
    case ElementType::BFloat16: return cuda::CastType::BFloat16;
    case ElementType::Float16: return cuda::CastType::Float16;
    default: throw Error(ErrorKind::Generic, "no kernel casts between these types: cast before the transfer");
  }
}

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

// Aborts on a thread of its own: it has been seen to hang, and nobody must hang with it.
std::future<void> abort_aside(const NcclLibrary& nccl, ncclComm_t comm, int device) {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> out = done->get_future();
  std::thread([&nccl, comm, device, done] {
    cudaSetDevice(device);
    nccl.comm_abort(comm);
    done->set_value();
  }).detach();
  return out;
}

}  // namespace

std::shared_ptr<NcclDevice> NcclDevice::connect(const NcclMeeting& meeting, int device, TimePoint deadline,
                                                const std::function<void()>& checkpoint) {
  std::shared_ptr<NcclDevice> out(new NcclDevice(NcclLibrary::get(), device));
  const OnDevice here(device);
  cuda::load_kernels(device);  // before anything on the GPU waits for another rank
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    out->meet(meeting, &config, deadline, checkpoint);
  } catch (...) {
    out->abort();  // there is nothing to flush
    throw;
  }
  return out;
}

void NcclDevice::meet(const NcclMeeting& meeting, ncclConfig_t* config, TimePoint deadline,
                      const std::function<void()>& checkpoint) {
  ncclResult_t result = nccl_.comm_init_rank_config(&comm_, meeting.ranks, meeting.id, meeting.rank, config);
  for (;;) {
    if (comm_ != nullptr && (result == ncclSuccess || result == ncclInProgress)) {
      ncclResult_t state = ncclSuccess;
      result = nccl_.comm_get_async_error(comm_, &state);
      if (result == ncclSuccess) result = state;
    }
    if (result == ncclSuccess) return;
    const GroupOutcome outcome = nccl_.outcome(result, comm_);
    if (outcome.state == GroupState::Failed)
      throw Error(outcome.remote ? ErrorKind::PeerLost : ErrorKind::Generic,
                  fmt::format("NCCL {} could not connect {} GPUs: {}", nccl_version_text(nccl_.version()),
                              meeting.ranks, outcome.text));
    if (Clock::now() >= deadline)
      throw Error(ErrorKind::DeadlineExceeded,
                  fmt::format("NCCL did not connect {} GPUs in time: a rank has gone, or NCCL cannot reach it "
                              "(NCCL_SOCKET_IFNAME names the interface, NCCL_DEBUG=INFO shows what it does)",
                              meeting.ranks));
    checkpoint();
    std::this_thread::sleep_for(kPause);
  }
}

NcclDevice::NcclDevice(const NcclLibrary& nccl, int device) : nccl_(nccl), device_(device) {
  const OnDevice here(device_);
  kernels_ = make_stream();
  transfer_ = make_stream();
  for (cudaStream_t& gate : gates_) gate = make_stream();
}

NcclDevice::~NcclDevice() {
  close();
  if (aborted_.valid()) aborted_.wait_for(kAbortLimit);
  try {
    const OnDevice here(device_);
    for (cudaStream_t stream : {kernels_, transfer_, gates_[0], gates_[1], gates_[2], gates_[3]})
      if (stream != nullptr) cudaStreamDestroy(stream);
  } catch (const std::exception&) {
    // CUDA is gone, and its streams with it.
  }
}

void NcclDevice::close() noexcept {
  if (comm_ != nullptr && !flush()) abort();
}

// Passes on what the communicator has accepted, and destroys it. Returns whether that worked in time.
bool NcclDevice::flush() noexcept {
  try {
    const OnDevice here(device_);
    const TimePoint limit = Clock::now() + kFlushLimit;
    ncclResult_t result = nccl_.comm_finalize(comm_);
    while (result == ncclInProgress && Clock::now() < limit) {
      std::this_thread::sleep_for(kPause);
      if (nccl_.comm_get_async_error(comm_, &result) != ncclSuccess) return false;
    }
    if (result != ncclSuccess) return false;
    nccl_.comm_destroy(std::exchange(comm_, nullptr));
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

cudaStream_t NcclDevice::make_stream() const {
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for the priorities of streams", device_);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "making a stream", device_);
  return stream;
}

RoundDevice::Stream NcclDevice::next_gate() {
  gate_ = (gate_ + 1) % gates_.size();
  return handle(gates_[gate_]);
}

RoundDevice::Event NcclDevice::make_event() {
  const OnDevice here(device_);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event", device_);
  return handle(event);
}

void NcclDevice::free_event(Event event) noexcept {
  try {
    const OnDevice here(device_);
    cudaEventDestroy(event_of(event));
  } catch (const std::exception&) {
    // CUDA is gone, and its events with it.
  }
}

void NcclDevice::record(Event event, Stream stream) {
  const OnDevice here(device_);
  check(cudaEventRecord(event_of(event), stream_of(stream)), "recording an event", device_);
}

void NcclDevice::wait(Stream stream, Event event) {
  const OnDevice here(device_);
  check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "ordering a stream", device_);
}

bool NcclDevice::reached(Event event) {
  const OnDevice here(device_);
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();  // else somebody else's next check would find it
    return false;
  }
  check(status, "work that was enqueued before", device_);
  return true;
}

std::shared_ptr<std::byte> NcclDevice::allocate(int64_t nbytes) {
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

cuda::Target NcclDevice::target(Stream stream) const { return {device_, stream_of(stream), 0}; }

void NcclDevice::move_boxes(Stream stream, std::span<const BoxMove> boxes) {
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
      cuda::cast_boxes(pairs_, cast_type(first.from_type), cast_type(first.to_type), target(stream));
  });
}

void NcclDevice::reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) {
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

// NCCL counts groups by thread and looks up the GPU of a communicator itself.
GroupOutcome NcclDevice::group_start() { return nccl_.outcome(nccl_.group_start(), nullptr); }

GroupOutcome NcclDevice::send(const std::byte* data, int64_t nbytes, int32_t peer, Stream stream) {
  return nccl_.outcome(nccl_.send(data, static_cast<size_t>(nbytes), ncclUint8, peer, comm_, stream_of(stream)),
                       comm_);
}

GroupOutcome NcclDevice::recv(std::byte* data, int64_t nbytes, int32_t peer, Stream stream) {
  return nccl_.outcome(nccl_.recv(data, static_cast<size_t>(nbytes), ncclUint8, peer, comm_, stream_of(stream)),
                       comm_);
}

GroupOutcome NcclDevice::group_end() {
  const OnDevice here(device_);
  return nccl_.outcome(nccl_.group_end(), comm_);
}

GroupOutcome NcclDevice::async_error() {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &state);
  return nccl_.outcome(asked == ncclSuccess ? state : asked, comm_);
}

void NcclDevice::abort() noexcept {
  if (comm_ == nullptr) return;
  try {
    aborted_ = abort_aside(nccl_, comm_, device_);
  } catch (const std::exception&) {
    nccl_.comm_abort(comm_);  // no more threads: then here
  }
  comm_ = nullptr;
}

}  // namespace meshcast
