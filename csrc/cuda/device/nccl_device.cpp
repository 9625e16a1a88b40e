#include "cuda/device/nccl_device.h"

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "cuda/device/cuda_call.h"

namespace meshcast {
namespace {

constexpr auto kPause = std::chrono::milliseconds(1);  // between two looks at a communicator that is being made
constexpr auto kFlushLimit =
    std::chrono::seconds(2);  // for messages that NCCL still has to send when a group closes
constexpr auto kAbortLimit = std::chrono::seconds(5);  // an abort that hangs is left behind, see abort()

// Aborts on a thread of its own: it has been seen to hang, and no other thread must hang with it.
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

// By GPU: the blocks of all communicators of this process.
std::atomic<int>& blocks_on(int device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, std::atomic<int>>;  // outlives objects that end when the process exits
  const std::lock_guard lock(mutex);
  return all[device];
}

}  // namespace

int nccl_blocks_left(int device) {
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "asking for the multiprocessors", device);
  return multiprocessors - blocks_on(device);
}

std::shared_ptr<NcclDevice> NcclDevice::connect(const NcclMeeting& meeting, int device, TimePoint deadline,
                                                const std::function<void()>& checkpoint) {
  std::shared_ptr<NcclDevice> out(new NcclDevice(NcclLibrary::get(), device, meeting.blocks));
  const OnDevice here(device);
  cuda::load_kernels(device);  // before anything on the GPU waits for another rank
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = meeting.blocks;  // NCCL_MAX_CTAS comes before it
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
      throw Error(
          ErrorKind::DeadlineExceeded,
          fmt::format("NCCL did not connect {} GPUs in time: a rank has exited, or NCCL cannot reach it "
                      "(NCCL_SOCKET_IFNAME names the interface, NCCL_DEBUG=INFO shows what it does)",
                      meeting.ranks));
    checkpoint();
    std::this_thread::sleep_for(kPause);
  }
}

NcclDevice::NcclDevice(const NcclLibrary& nccl, int device, int blocks)
    : CudaDevice(device), nccl_(nccl), blocks_(blocks) {
  blocks_on(device) += blocks_;
}

NcclDevice::~NcclDevice() {
  close();
  if (aborted_.valid()) aborted_.wait_for(kAbortLimit);
  blocks_on(device()) -= blocks_;
}

void NcclDevice::close() noexcept {
  if (comm_ != nullptr && !flush()) abort();
}

// Passes on what the communicator has accepted, and destroys it. Returns whether that worked in time.
bool NcclDevice::flush() noexcept {
  try {
    const OnDevice here(device());
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
  const OnDevice here(device());
  return nccl_.outcome(nccl_.group_end(), comm_);
}

// Until an abort is over, NCCL's own thread may yet launch what the last group held, on a stream that is past
// the event: the memory that it touches is not given back before.
bool NcclDevice::reached(Event event) {
  const bool aborting =
      aborted_.valid() && aborted_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  return !aborting && CudaDevice::reached(event);
}

GroupOutcome NcclDevice::async_error() {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &state);
  return nccl_.outcome(asked == ncclSuccess ? state : asked, comm_);
}

void NcclDevice::abort() noexcept {
  if (comm_ == nullptr) return;
  try {
    aborted_ = abort_aside(nccl_, comm_, device());
  } catch (const std::exception&) {
    nccl_.comm_abort(comm_);  // no more threads: then here
  }
  comm_ = nullptr;
}

}  // namespace meshcast
