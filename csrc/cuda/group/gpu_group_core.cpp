#include "cuda/group/gpu_group_core.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "c10d/tensor_memory.h"
#include "common/thread_name.h"
#include "cuda/device/nccl_device.h"
#include "cuda/group/cuda_work.h"

namespace meshcast {
namespace {

constexpr auto kTick = std::chrono::milliseconds(1);
constexpr auto kRest = std::chrono::milliseconds(500);  // between looks at staging that is not needed
constexpr auto kLook = std::chrono::milliseconds(200);  // between looks at the board while ranks connect

// The types of a tensor that is not cast: that of either end.
TensorTypes types_of(const std::optional<at::Tensor>& source, const std::optional<at::Tensor>& destination) {
  const at::ScalarType type = source        ? source->scalar_type()
                              : destination ? destination->scalar_type()
                                            : at::ScalarType::Undefined;
  return {type, type, type};
}

void check_type(const char* side, const std::optional<at::Tensor>& tensor, at::ScalarType expected,
                size_t index) {
  if (tensor && tensor->scalar_type() != expected)
    throw LayoutError(fmt::format("{} tensor {}: expected elements of type {}, found {}", side, index,
                                  c10::toString(expected), c10::toString(tensor->scalar_type())));
}

// The objects that a run keeps until the GPU is done with them.
struct Kept {
  std::shared_ptr<void> tensors;
  std::shared_ptr<CudaDevice::Gate> gate;
};

// Bytes of an element at one end of a tensor that travels in `wire_bytes`.
int64_t bytes_of(ElementType type, ElementType wire, int64_t wire_bytes) {
  return type == wire ? wire_bytes : size_of(type);
}

}  // namespace

class GpuGroupCore::WatchedLanes final : public Watched {
 public:
  explicit WatchedLanes(GpuGroupCore& group) : group_(group) {}

  std::vector<std::shared_ptr<RunState>> in_flight() override {
    std::vector<std::shared_ptr<RunState>> out;
    for (const auto& engine : group_.engines()) {
      const auto runs = engine->in_flight();
      out.insert(out.end(), runs.begin(), runs.end());
    }
    return out;
  }
  std::exception_ptr error() const override { return group_.failure(); }
  void fail(std::exception_ptr error) override { group_.fail(error); }

 private:
  GpuGroupCore& group_;
};

GpuGroupCore::GpuGroupCore(std::shared_ptr<GroupCore> control, const std::shared_ptr<Store>& store,
                           GroupIdentity identity, int device)
    : GroupBase(std::move(identity)),
      control_(std::move(control)),
      device_(device),
      bulletin_(store),
      watched_(std::make_unique<WatchedLanes>(*this)) {
  // Both begin to look at once, at all that is here.
  watcher_ = std::make_shared<Watcher>(*watched_, identity_, store);
  try {
    poller_ = std::thread([this] {
      name_this_thread("mc-poll");
      poll_loop();
    });
  } catch (...) {
    watcher_->stop();  // its lanes are destroyed before it
    throw;
  }
}

GpuGroupCore::~GpuGroupCore() { shutdown(); }

void GpuGroupCore::connect(int32_t lane, const std::string& unique_id, int blocks, const RoundOptions& options,
                           double timeout_seconds) {
  NcclMeeting meeting;
  if (unique_id.size() != sizeof(meeting.id.internal))
    throw LayoutError(fmt::format("the id of a communicator has {} bytes, found {}",
                                  sizeof(meeting.id.internal), unique_id.size()));
  std::memcpy(meeting.id.internal, unique_id.data(), unique_id.size());
  meeting.blocks = blocks;
  meeting.ranks = static_cast<int>(identity_.ranks.size());
  add_lane(lane, timeout_seconds, options, [&](int32_t rank, TimePoint deadline, const auto& checkpoint) {
    meeting.rank = rank;
    return NcclDevice::connect(meeting, device_, deadline, checkpoint);
  });
}

void GpuGroupCore::connect_ipc(int32_t lane, IpcMeeting& meeting, const std::vector<std::string>& addresses,
                               const RoundOptions& options, double timeout_seconds) {
  if (addresses.size() != identity_.ranks.size())
    throw LayoutError(
        fmt::format("{} ranks need as many addresses, found {}", identity_.ranks.size(), addresses.size()));
  const auto connect = [&](int32_t rank, TimePoint deadline, const auto& checkpoint) {
    return IpcDevice::connect(meeting, addresses, rank, device_, deadline, checkpoint);
  };
  add_lane(lane, timeout_seconds, ipc_round_options(options), connect);
}

void GpuGroupCore::add_lane(int32_t lane, double timeout_seconds, const RoundOptions& options,
                            const Connect& connect) {
  control_->refuse_if_failed();
  refuse_if_failed();
  const auto me = std::lower_bound(identity_.ranks.begin(), identity_.ranks.end(), identity_.rank);
  const auto rank = static_cast<int32_t>(me - identity_.ranks.begin());
  TimePoint last_look = Clock::now();
  // Called again and again while ranks connect. The board is on the network, so it is asked every kLook only.
  const auto checkpoint = [&] {
    control_->refuse_if_failed();
    refuse_if_failed();
    if (Clock::now() - last_look < kLook) return;
    last_look = Clock::now();
    if (const auto cause = bulletin_.read_cause())
      throw Error(ErrorKind::Aborted, fmt::format("group {} was aborted by rank {}: {}", identity_.name,
                                                  cause->reporter, cause->text));
  };
  std::shared_ptr<CudaDevice> device;
  try {
    device = connect(rank, deadline_after(timeout_seconds), checkpoint);
  } catch (const Error& error) {
    throw connect_error(error.kind(), error.what(), timeout_seconds);
  } catch (const std::exception& error) {  // of torch, where CUDA does not work
    throw connect_error(ErrorKind::Generic, error.what(), timeout_seconds);
  }
  RoundObserver observer;
  observer.begun = [this] {
    watcher_->wake();
    const std::lock_guard lock(poll_mutex_);
    ++begun_;
    poll_changed_.notify_all();
  };
  observer.failed = [this](const Error& error, const std::shared_ptr<RoundRun>& run) {
    watcher_->run_failed(error, *run);
  };
  auto engine = std::make_shared<RoundEngine>(device, identity_.rank, identity_.ranks, std::move(observer));
  const std::lock_guard lock(mutex_);
  if (shut_down_) std::rethrow_exception(error_);
  lanes_.emplace(lane, Lane{std::move(device), std::move(engine), options});
}

Error GpuGroupCore::connect_error(ErrorKind kind, const std::string& text, double limit) const {
  ErrorContext context;
  context.rank = identity_.rank;
  context.op = "connect";
  context.phase = "connect";
  context.limit = limit;
  return {kind,
          fmt::format("rank {}: connecting the GPUs of ranks {}: {}", identity_.rank,
                      format_ranks(identity_.ranks), text),
          context};
}

c10::intrusive_ptr<c10d::Work> GpuGroupCore::start(const AgreedPlan& agreed, StartArgs args,
                                                   const std::vector<TensorTypes>& types,
                                                   RoundDevice::Event after, bool hop_by_hop) {
  bin_->empty();
  control_->refuse_if_failed();
  refuse_if_failed();
  PlanDirection& direction = agreed.direction(args.reverse);
  const auto& problems = direction.plan->problems;
  TakenTensors taken = take_tensors(direction, args);
  if (!types.empty() && types.size() != problems.size())
    throw LayoutError(
        fmt::format("the plan has {} tensors, types are given of {}", problems.size(), types.size()));
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(device_));
  RoundMemory memory;
  TensorForms forms;
  for (size_t i = 0; i < problems.size(); ++i) {
    const auto& src = args.source[i];
    const auto& dst = args.destination[i];
    const TensorTypes of = types.empty() ? types_of(src, dst) : types[i];
    check_type("source", src, of.source, i);
    check_type("destination", dst, of.destination, i);
    const ElementType wire = element_type(of.wire);
    TensorForm source{{}, 0, element_type(of.source)};
    TensorForm destination{{}, 0, element_type(of.destination)};
    source.element_bytes = bytes_of(source.type, wire, problems[i].element_bytes);
    destination.element_bytes = bytes_of(destination.type, wire, problems[i].element_bytes);
    const TensorMemory from =
        source_memory(src, direction.tensors.source_shapes[i], source.element_bytes, i, device);
    const TensorMemory to =
        destination_memory(dst, direction.tensors.destination_shapes[i], destination.element_bytes, i, device);
    source.stride = from.stride;
    destination.stride = to.stride;
    memory.source.push_back(from.data);
    memory.destination.push_back(to.data);
    forms.source.push_back(source);
    forms.destination.push_back(destination);
    forms.wire.push_back(wire);
  }
  RunLabel label = agreed.label(args.reverse, args.ordinal);
  Lane lane = lane_of(label.lane);
  if (hop_by_hop) lane.options.round_ns = 1;
  // The gate is a stream that stands for the caller's: `after` puts it behind the caller's work, and wait()
  // joins the caller's stream to it.
  const auto gate = CudaDevice::take_gate(lane.device);
  memory.keepalive = std::make_shared<Kept>(Kept{bin_->bag(std::move(taken.kept)), gate});
  std::shared_ptr<RoundRun> run;
  try {
    run = lane.engine->start(direction.rounds(lane.options).of(forms), std::move(memory), gate->stream(),
                             std::move(label), deadline_after(args.timeout_seconds), after);
  } catch (const std::exception& error) {
    // The others must not wait for the rest. Errors that the watcher has seen are on the board already.
    if (lane.engine->error()) abort(fmt::format("a call could not be started: {}", error.what()));
    throw;
  }
  return c10::make_intrusive<CudaWork>(identity_.rank, std::move(run), lane.engine, lane.device, bin_,
                                       std::move(taken.outputs));
}

GpuGroupCore::Lane GpuGroupCore::lane_of(int32_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = lanes_.find(number);
  if (found == lanes_.end())
    throw Error(ErrorKind::Generic, fmt::format("rank {}: lane {} of group {} has no communicator",
                                                identity_.rank, number, identity_.name));
  return found->second;
}

std::exception_ptr GpuGroupCore::failure() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::vector<std::shared_ptr<RoundEngine>> GpuGroupCore::engines() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<RoundEngine>> out;
  for (const auto& [lane, each] : lanes_) out.push_back(each.engine);
  return out;
}

void GpuGroupCore::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = error;
  }
  for (const auto& engine : engines()) engine->fail(error);
  control_->abort(text_of(error));
}

// Ends complete runs, frees their tensors and checks for errors of NCCL. Continues after a failure, until the
// GPU has finished with everything.
void GpuGroupCore::poll_loop() {
  std::unique_lock lock(poll_mutex_);
  while (!poll_stopping_) {
    const uint64_t seen = begun_;
    lock.unlock();
    Next next = Next::Call;
    try {
      next = poll_once();
    } catch (const std::bad_alloc& error) {  // of this poll: a later one sees the work on the GPU end
      abort(fmt::format("no memory to look after the GPU with: {}", error.what()));
      next = Next::Soon;
    } catch (const std::exception& error) {
      // The GPU is lost to this process: nothing that runs there will be seen to end.
      abort(error.what());
      lock.lock();
      return;
    }
    lock.lock();
    const auto woken = [&] { return poll_stopping_ || begun_ != seen; };
    if (next == Next::Soon)
      poll_changed_.wait_for(lock, kTick, [&] { return poll_stopping_; });
    else if (next == Next::Rest)
      poll_changed_.wait_for(lock, kRest, woken);
    else
      poll_changed_.wait(lock, woken);
  }
}

GpuGroupCore::Next GpuGroupCore::poll_once() {
  const TimePoint now = Clock::now();
  const bool looks = now - last_rest_ >= kRest;  // it asks the sockets of all peers
  if (looks) last_rest_ = now;
  bool more = false;
  bool rests = !looks;
  for (const auto& engine : engines()) {
    engine->poll(Clock::now());
    more = more || !engine->idle();
    if (looks) rests = engine->rest(now) || rests;
  }
  if (more) return Next::Soon;
  if (rests) return Next::Rest;
  // Without any lock: it may wait for all that runs on the GPU, which may not end once a rank has failed.
  if (!failure()) ipc_staging(device_).trim();
  return Next::Call;
}

void GpuGroupCore::shutdown() {
  if (origin_.foreign()) return;  // the threads are the parent's, and locks may be held
  {
    const std::lock_guard lock(mutex_);
    if (shut_down_) return;
    shut_down_ = true;
  }
  // Threads first, the watcher's and the poller: no other thread may look at an engine while it is given up.
  watcher_->stop();
  {
    const std::lock_guard lock(poll_mutex_);
    poll_stopping_ = true;
    poll_changed_.notify_all();
  }
  poller_.join();
  std::map<int32_t, Lane> lanes;
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    failed = error_ != nullptr;
    if (!failed) error_ = shut_down_error();
    lanes.swap(lanes_);
  }
  // Works keep their engine alive: runs in flight and communicators end here, and not with them.
  for (const auto& [lane, each] : lanes) {
    if (each.engine->idle()) {
      each.device->close();
    } else {
      each.engine->fail(error_);
      each.engine->drain();  // works may outlive this group, which is the observer
    }
  }
  lanes.clear();
  bin_->empty();
  if (!failed) ipc_staging(device_).trim();
}

std::string nccl_unique_id() {
  const NcclLibrary& nccl = NcclLibrary::get();
  ncclUniqueId id{};
  const ncclResult_t result = nccl.get_unique_id(&id);
  if (result != ncclSuccess)
    throw Error(ErrorKind::Generic,
                "NCCL gave no id for a communicator: " + nccl.outcome(result, nullptr).text);
  return {id.internal, sizeof(id.internal)};
}

}  // namespace meshcast
