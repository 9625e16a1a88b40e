#include "cuda/device/ipc_device.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda.h>

#include "cuda/device/cuda_call.h"
#include "cuda/kernels/driver_function.h"

namespace meshcast {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(IpcHandle) &&
              sizeof(cudaIpcEventHandle_t) == sizeof(IpcHandle));

}  // namespace

// One for each GPU and process; outlives objects that end when the process exits.
class CudaIpcDriver::Pool {
 public:
  static Pool& of(int device) {
    static std::mutex mutex;
    static auto& pools = *new std::map<int, Pool*>;
    const std::lock_guard lock(mutex);
    Pool*& pool = pools[device];
    if (pool == nullptr) pool = new Pool(device);
    return *pool;
  }

  IpcMappings mappings;
  // Memory of cudaMalloc, which CUDA IPC can export, however torch is set to allocate.
  StagingPool staging;

 private:
  explicit Pool(int device)
      : staging({[device](int64_t nbytes) { return allocate(device, nbytes); },
                 [device](std::byte* data) { give_back(device, data); }}) {}

  static std::byte* allocate(int device, int64_t nbytes) {
    const OnDevice here(device);
    void* out = nullptr;
    cudaError_t status = cudaMalloc(&out, static_cast<size_t>(nbytes));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // else the next check of other code would find it
      c10::cuda::CUDACachingAllocator::emptyCache();
      status = cudaMalloc(&out, static_cast<size_t>(nbytes));
    }
    check_cuda(status, "allocating memory that other processes can map", device);
    return static_cast<std::byte*>(out);
  }
  static void give_back(int device, std::byte* data) noexcept {
    try {
      const OnDevice here(device);
      let_go(cudaFree(data));
    } catch (const std::exception&) {
      // CUDA has ended, and its memory with it.
    }
  }
};

CudaIpcDriver::CudaIpcDriver(int device) : device_(device), pool_(Pool::of(device)) {}

std::shared_ptr<std::byte> CudaIpcDriver::allocate_exportable(int64_t nbytes) {
  return {pool_.staging.take(nbytes), [&pool = pool_](std::byte* data) { pool.staging.give(data); }};
}

// Segments that torch expands, and memory of cudaMallocAsync, answer that they are not capable.
std::optional<IpcRange> CudaIpcDriver::exportable(const std::byte* data) {
  static const auto ask =
      cuda::driver_function<decltype(&cuPointerGetAttributes)>("cuPointerGetAttributes", 12000);
  if (ask == nullptr)
    throw Error(ErrorKind::Generic,
                "the CUDA driver does not report which memory other processes can map: install "
                "one of CUDA 12 or newer");
  const OnDevice here(device_);
  // The driver's own functions want what a thread's first call of the runtime makes.
  check_cuda(cudaSetDevice(device_), "choosing the GPU", device_);
  int capable = 0;  // of which the driver may write one byte only
  CUdeviceptr base = 0;
  size_t nbytes = 0;
  unsigned long long id = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                 CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                 CU_POINTER_ATTRIBUTE_BUFFER_ID};
  void* values[] = {&capable, &base, &nbytes, &id};
  const CUresult result = ask(4, names, values, reinterpret_cast<CUdeviceptr>(data));
  if (result != CUDA_SUCCESS)
    throw Error(ErrorKind::Generic,
                fmt::format("asking the driver about memory on CUDA device {} failed: error {}", device_,
                            static_cast<int>(result)));
  if (capable == 0 || base == 0) return std::nullopt;
  return IpcRange{reinterpret_cast<std::byte*>(base), static_cast<int64_t>(nbytes), id};
}

std::optional<IpcHandle> CudaIpcDriver::export_memory(const IpcRange& range) {
  const OnDevice here(device_);
  cudaIpcMemHandle_t handle;
  const cudaError_t status = cudaIpcGetMemHandle(&handle, range.base);
  if (status == cudaErrorInvalidValue || status == cudaErrorNotSupported) {
    let_go(status);
    return std::nullopt;
  }
  check_cuda(status, "exporting memory to other processes", device_);
  return std::bit_cast<IpcHandle>(handle);
}

std::byte* CudaIpcDriver::open_memory(const IpcHandle& handle) {
  const OnDevice here(device_);
  void* out = nullptr;
  const cudaError_t status =
      cudaIpcOpenMemHandle(&out, std::bit_cast<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess);
  if (status == cudaErrorAlreadyMapped) {
    let_go(status);
    return nullptr;
  }
  check_cuda(status, "mapping another process's memory", device_);
  return static_cast<std::byte*>(out);
}

IpcMappings& CudaIpcDriver::mappings() { return pool_.mappings; }

StagingPool& CudaIpcDriver::staging() { return pool_.staging; }

StagingPool& ipc_staging(int device) { return CudaIpcDriver(device).staging(); }

void CudaIpcDriver::close_memory(std::byte* base) noexcept {
  try {
    const OnDevice here(device_);
    let_go(cudaIpcCloseMemHandle(base));
  } catch (const std::exception&) {
    // CUDA has ended, and its mappings with it.
  }
}

RoundDevice::Event CudaIpcDriver::make_ipc_event(IpcHandle* handle) {
  const OnDevice here(device_);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
             "making an event for other processes", device_);
  cudaIpcEventHandle_t out;
  const cudaError_t status = cudaIpcGetEventHandle(&out, event);
  if (status != cudaSuccess) cudaEventDestroy(event);
  check_cuda(status, "exporting an event to other processes", device_);
  *handle = std::bit_cast<IpcHandle>(out);
  return handle_of(event);
}

RoundDevice::Event CudaIpcDriver::open_event(const IpcHandle& handle) {
  const OnDevice here(device_);
  cudaEvent_t event = nullptr;
  check_cuda(cudaIpcOpenEventHandle(&event, std::bit_cast<cudaIpcEventHandle_t>(handle)),
             "opening another process's event", device_);
  return handle_of(event);
}

void CudaIpcDriver::copy(Stream stream, std::byte* to, const std::byte* from, int64_t nbytes) {
  const OnDevice here(device_);
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), cudaMemcpyDefault, stream_of(stream)),
             "copying another process's memory", device_);
}

std::shared_ptr<IpcDevice> IpcDevice::connect(IpcMeeting& meeting, const std::vector<std::string>& addresses,
                                              int32_t rank, int device, TimePoint deadline,
                                              const std::function<void()>& checkpoint) {
  std::shared_ptr<IpcDevice> out(new IpcDevice(device));
  const OnDevice here(device);
  cuda::load_kernels(device);  // as with NCCL: a first launch later may wait for all that runs on the GPU
  out->groups_ = IpcExchange::connect(out->driver_, *out, meeting, addresses, rank, deadline, checkpoint);
  return out;
}

std::shared_ptr<IpcProof> IpcDevice::prove(int device) {
  struct Proof {
    explicit Proof(int number) : device(new IpcDevice(number)), proof(device->driver_, *device) {}
    const std::unique_ptr<IpcDevice> device;
    IpcProof proof;
  };
  try {
    const auto out = std::make_shared<Proof>(device);
    return {out, &out->proof};
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of torch, where CUDA does not work
    throw Error(ErrorKind::Generic, error.what());
  }
}

IpcDevice::~IpcDevice() { groups_.reset(); }

void IpcDevice::close() noexcept { groups_->close(); }

std::shared_ptr<std::byte> IpcDevice::allocate(int64_t nbytes) { return driver_.allocate_exportable(nbytes); }

void IpcDevice::retire(const std::byte* staging) { groups_->retire(staging); }

bool IpcDevice::rest() { return groups_->rest(); }

GroupOutcome IpcDevice::group_start() {
  groups_->start();
  return {};
}

// The engine sends and receives on the transfer stream alone, which the groups have been given.
GroupOutcome IpcDevice::send(const std::byte* data, int64_t nbytes, int32_t peer, Stream /*stream*/) {
  return groups_->send(data, nbytes, peer);
}

GroupOutcome IpcDevice::recv(std::byte* data, int64_t nbytes, int32_t peer, Stream /*stream*/) {
  return groups_->recv(data, nbytes, peer);
}

GroupOutcome IpcDevice::group_end() { return groups_->end(); }

GroupOutcome IpcDevice::async_error() { return groups_->progress(); }

void IpcDevice::abort() noexcept { groups_->abort(); }

RoundOptions ipc_round_options(RoundOptions known) {
  if (known.link_rate == 0) known.link_rate = 1'000'000'000'000;  // of copies inside a GPU
  // staging_bytes: a sixth of it in one round and direction, also of messages that need no staging: of 256 MiB,
  // 43, which a GPU copies in about the time of a meeting.
  return known;
}

std::string cuda_ipc_obstacle(int device) {
  try {
    const OnDevice here(device);
    int events = 0;
    check_cuda(cudaDeviceGetAttribute(&events, cudaDevAttrIpcEventSupport, device), "asking about CUDA IPC",
               device);
    if (events == 0) return "the driver shares no events between processes on this GPU";
    CudaIpcDriver driver(device);
    const auto memory = driver.allocate_exportable(1);
    const auto range = driver.exportable(memory.get());
    if (!range || !driver.export_memory(*range))
      return "the driver lets no other process map memory of this GPU (a virtual GPU or a container may be "
             "why)";
    IpcHandle handle;
    destroy_event(driver.make_ipc_event(&handle), device);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace meshcast
