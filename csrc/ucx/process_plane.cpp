#include "ucx/process_plane.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>

#include <fmt/format.h>
#include <unistd.h>

#include "common/descriptors.h"
#include "common/error.h"
#include "common/fault_point.h"
#include "common/of_process.h"
#include "ucx/forked.h"

namespace meshcast::ucx {
namespace {

constexpr auto kFlushLimit = std::chrono::seconds(2);
constexpr auto kEndLimit = std::chrono::seconds(1);  // for threads to leave UCX when the process ends
constexpr size_t kLeftGroups = 1024;                 // whose late messages are known as such
constexpr size_t kEarlyMessages = 4096;              // kept for a group that is not joined yet
constexpr size_t kSpareFragments = 16;

std::map<std::string, std::string> settings(const PlaneOptions& options) {
  // A peer is asked thrice before it counts as lost.
  const auto third = static_cast<int64_t>(std::max(1.0, options.peer_seconds / 3));
  const std::string interval = fmt::format("{}s", third);
  const std::string segment = fmt::format("{}", kSegmentBytes);
  std::map<std::string, std::string> out = {
      {"TLS", "^sm,cuda,self"},  // of this host, and of no use here: they cannot detect that a peer died
      {"TCP_TX_SEG_SIZE", segment},
      {"TCP_RX_SEG_SIZE", segment},
      {"MAX_RNDV_RAILS", "1"},
      {"MAX_EAGER_RAILS", "1"},  // the plan deals messages out to NICs
      {"TCP_KEEPIDLE", interval},
      {"TCP_KEEPINTVL", interval},
      {"TCP_KEEPCNT", "2"},
      {"KEEPALIVE_INTERVAL", interval},
      {"TCP_USER_TIMEOUT", fmt::format("{}s", 3 * third)},
  };
  if (options.rdma) {
    // For fragments that are fetched: the sender writes them, since memory that it takes back must not be read
    // any longer.
    out.emplace("RNDV_SCHEME", "put_zcopy");
  } else {
    // Nothing is fetched over TCP. Where UCX may weigh ways of sending or of fetching against each other, it
    // asks the system for the speed of the interface each time, in some 30 system calls: 120 times in a
    // process, and twice more for each connection.
    out.emplace("RNDV_SCHEME", "am");
    out.emplace("PROTO_ENABLE", "n");
  }
  return out;
}

OfProcess<ProcessPlane> plane_of_process;

// It is kept for ever: later destructors may have pointers to it.
void end_with_process() {
  static const auto* const kept = new std::shared_ptr<ProcessPlane>(plane_of_process.there());
  if (*kept) (*kept)->end_with_process();
}

}  // namespace

std::shared_ptr<Plane> Plane::of_process(const PlaneOptions& options) {
  refuse_in_children();
  return plane_of_process.get([&] {
    auto plane = std::make_shared<ProcessPlane>(options);
    // After UCX was loaded, so that it runs before UCX's own destructors.
    [[maybe_unused]] static const int once = std::atexit(::meshcast::ucx::end_with_process);
    return plane;
  });
}

uint32_t Plane::wire_version() { return kWireVersion; }

ProcessPlane::ProcessPlane(const PlaneOptions& options)
    : api_(load(options.library)), rdma_(options.rdma), progress_(Progress::of_process()) {
  std::random_device entropy;
  process_ = uint64_t{entropy()} << 32 | entropy();
  rails_.reserve(options.devices.size());  // callbacks have their addresses
  for (const std::string& device : options.devices) {
    rails_.push_back({std::make_unique<Worker>(api_, device, settings(options)), {}});
    for (int kind = 0; kind < kKinds; ++kind) {
      auto& inbox = rails_.back().inboxes[static_cast<size_t>(kind)];
      inbox = {this, rails_.size() - 1, static_cast<Kind>(kind)};
      rails_.back().worker->on_message(kFirstMessage + static_cast<unsigned>(kind), on_message, &inbox);
    }
  }
  progress_->add(*this);
}

ProcessPlane::~ProcessPlane() {
  if (foreign()) {  // threads, sockets and memory belong to the parent
    for (Rail& rail : rails_) static_cast<void>(rail.worker.release());
    return;
  }
  stop();
  close_gently();
}

bool ProcessPlane::stop(TimePoint limit) {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  return progress_->remove(*this, limit);
}

void ProcessPlane::end_with_process() {
  const bool left = stop(Clock::now() + kEndLimit);
  const std::lock_guard lock(mutex_);
  over_ = true;
  for (auto& [id, group] : groups_) group->abort_locked();
  for (auto& [key, link] : links_) {
    if (link->failure.empty()) link->failure = "the process ends";
  }
  if (!left) return;  // a thread may be in UCX yet
  close_gently();
  for (Rail& rail : rails_) rail.worker.reset();
}

void ProcessPlane::check_not_over_locked() const {
  if (over_) throw Error(ErrorKind::Aborted, "the process ends");
}

Address ProcessPlane::address() const {
  Address out;
  out.process = process_;
  const std::lock_guard lock(mutex_);
  check_not_over_locked();
  for (const Rail& rail : rails_) out.rails.push_back(rail.worker->address());
  out.breaks = breaks_;
  return out;
}

// Everything except `rank` came from the other ranks. Values that pass may be used as indices later.
void ProcessPlane::check_members(const std::vector<Address>& members, int rank,
                                 const std::vector<int32_t>& first_rail) const {
  if (rank < 0 || static_cast<size_t>(rank) >= members.size() || first_rail.size() != members.size())
    throw LayoutError(fmt::format("a group of {} ranks needs as many first rails and has no rank {}; found {}",
                                  members.size(), rank, first_rail.size()));
  for (size_t at = 0; at < members.size(); ++at) {
    if (members[at].rails.size() != rails_.size() || first_rail[at] < 0)
      throw LayoutError(
          fmt::format("rank {} of the group has {} rails, the first of them number {}; this rank has {}. All "
                      "ranks need equally many (MESHCAST_IFNAMES)",
                      at, members[at].rails.size(), first_rail[at], rails_.size()));
  }
}

std::shared_ptr<ProbingTransport> ProcessPlane::join(uint64_t id, std::vector<Address> members, int rank,
                                                     std::vector<int32_t> first_rail) {
  MC_FAULT_POINT("join");
  check_members(members, rank, first_rail);
  auto group = std::make_shared<GroupTransport>(shared_from_this(), id, members, rank, std::move(first_rail));
  {
    const std::lock_guard lock(mutex_);
    settle_breaks_locked(members, rank, *group);
    groups_[id] = group.get();
    auto early = early_.extract(id);
    if (!early.empty()) {
      for (const Early& each : early.mapped()) {
        group->arrived_locked(each.kind, each.header, each.data.data(), static_cast<int64_t>(each.data.size()));
      }
    }
  }
  return group;
}

std::function<std::string()> ProcessPlane::watch(const Address& address) {
  if (address.rails.empty()) throw LayoutError("a rank that is watched needs a rail, found none");
  // A connection also breaks where one end gave up on some group. So the first break proves nothing, but that
  // of the connection made after it does: a dead process refuses it.
  return [plane = shared_from_this(), address, link = std::shared_ptr<Link>(), left = 2,
          why = std::string()]() mutable {
    if (plane->foreign() || address.process == plane->process_) return std::string();
    {
      const std::lock_guard lock(plane->mutex_);
      if (link && link->failure.empty()) return std::string();
      if (link) why = link->failure;
      if (left == 0) return why;
      try {
        link = plane->link_locked(address.process, 0, address.rails.front());
        --left;
      } catch (const Error& error) {
        link = nullptr;
        if (out_of_descriptors()) return std::string();
        why = error.what();
        --left;
      }
    }
    plane->wake();
    return std::string();
  };
}

void ProcessPlane::leave_locked(uint64_t id) {
  groups_.erase(id);
  left_.push_back(id);
  if (left_.size() > kLeftGroups) left_.pop_front();
}

// ---- connections ----

std::shared_ptr<Link> ProcessPlane::link_locked(uint64_t process, size_t rail, const std::string& address) {
  const auto it = links_.find({process, rail});
  if (it != links_.end()) return it->second;
  check_not_over_locked();
  auto link = std::make_shared<Link>();
  link->worker = rails_[rail].worker.get();
  link->process = process;
  link->broken = &broken_;
  MC_FAULT_POINT("link");
  link->endpoint = link->worker->connect(address, on_lost, link.get());
  links_.emplace(std::pair{process, rail}, link);
  return link;
}

void ProcessPlane::on_lost(void* link, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  auto* lost = static_cast<Link*>(link);
  if (lost->failure.empty()) lost->failure = lost->worker->api().ucs_status_string(status);
  lost->broken->push_back(lost);
}

void ProcessPlane::break_locked(Link& link, const std::string& why) {
  if (!link.failure.empty()) return;
  link.failure = why;
  broken_.push_back(&link);
}

// Ends what is in flight on a connection, at once and on this side alone, and notifies all groups.
void ProcessPlane::close_locked(Link& link) {
  ucp_ep_h endpoint = std::exchange(link.endpoint, nullptr);
  if (!endpoint) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = api_.ucp_ep_close_nbx(endpoint, &param);
  if (request && !UCS_PTR_IS_ERR(request)) api_.ucp_request_free(request);
  const uint64_t process = link.process;
  const std::string reason = link.failure;
  for (auto& [id, group] : groups_) group->lost_locked(process, reason);
}

std::vector<std::shared_ptr<Link>> ProcessPlane::links_to_locked(uint64_t process) const {
  std::vector<std::shared_ptr<Link>> out;
  for (auto it = links_.lower_bound({process, 0}); it != links_.end() && it->first.first == process; ++it) {
    if (it->second->failure.empty()) out.push_back(it->second);
  }
  return out;
}

// Drops all rails: a group is notified of a process, and another group may connect with it again.
void ProcessPlane::drop_links_locked(uint64_t process) {
  ++breaks_[process];
  const auto from = links_.lower_bound({process, 0});
  const auto to = links_.upper_bound({process, rails_.size()});
  std::string why;
  for (auto it = from; it != to; ++it) {
    if (why.empty()) why = it->second->failure;
  }
  std::vector<std::shared_ptr<Link>> links;
  for (auto it = from; it != to; ++it) links.push_back(it->second);
  links_.erase(from, to);
  for (const auto& link : links) {
    std::erase(broken_, link.get());
    if (link->failure.empty()) link->failure = why.empty() ? "the peer had closed the connection" : why;
    close_locked(*link);
  }
}

// A peer that closed a connection by force does not notify the other end: messages to it would vanish. So
// before a new group uses what other groups have left, both ends compare how often they saw it broken. If this
// end saw it once more since it sent its count, the others do not know.
void ProcessPlane::settle_breaks_locked(const std::vector<Address>& members, int rank, GroupTransport& group) {
  const std::map<uint64_t, uint32_t>& told = members[static_cast<size_t>(rank)].breaks;
  const auto count = [](const std::map<uint64_t, uint32_t>& breaks, uint64_t process) {
    const auto it = breaks.find(process);
    return it == breaks.end() ? 0 : it->second;
  };
  for (const Address& member : members) {
    const uint32_t here = count(breaks_, member.process);
    const uint32_t there = count(member.breaks, process_);
    if (here != count(told, member.process)) {
      group.lost_locked(member.process, "the connection broke while the group was made");
    } else if (there > here) {
      drop_links_locked(member.process);
      breaks_[member.process] = there;
    }
  }
}

// Completes sends that are still in flight, within a limit, and notifies the peers that this process leaves.
void ProcessPlane::close_gently() {
  std::vector<void*> requests;
  for (auto& [key, link] : links_) {
    if (!link->endpoint) continue;
    ucp_request_param_t param{};
    void* request = api_.ucp_ep_close_nbx(std::exchange(link->endpoint, nullptr), &param);
    if (request && !UCS_PTR_IS_ERR(request)) requests.push_back(request);
  }
  const TimePoint limit = Clock::now() + kFlushLimit;
  while (!requests.empty() && Clock::now() < limit) {
    bool busy = false;
    for (Rail& rail : rails_) busy = rail.worker->progress() || busy;
    const auto gone = std::remove_if(requests.begin(), requests.end(), [this](void* request) {
      if (api_.ucp_request_check_status(request) == UCS_INPROGRESS) return false;
      api_.ucp_request_free(request);
      return true;
    });
    requests.erase(gone, requests.end());
    if (!busy) usleep(100);
  }
  // The end of the worker ends the others, in UCX 1.13 only those that their owner has freed.
  for (void* request : requests) api_.ucp_request_free(request);
}

// ---- messages ----

Fragment ProcessPlane::fragment_locked() {
  ++fragments_in_use_;
  if (spare_.empty()) return std::make_unique<std::byte[]>(kFragmentBytes);
  Fragment out = std::move(spare_.back());
  spare_.pop_back();
  return out;
}

void ProcessPlane::give_back_locked(Fragment fragment) {
  --fragments_in_use_;
  if (spare_.size() < kSpareFragments) spare_.push_back(std::move(fragment));
}

bool ProcessPlane::send_locked(std::unique_ptr<Flight> flight, const void* data, int64_t nbytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  // A device writes a fragment into a buffer of the receiver. Elsewhere that would cost another round trip.
  param.flags = rdma_ && flight->line ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = on_sent;
  param.user_data = flight.get();
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  void* request =
      api_.ucp_am_send_nbx(flight->link->endpoint, kFirstMessage + static_cast<unsigned>(flight->kind),
                           &flight->header, sizeof(Header), data, static_cast<size_t>(nbytes), &param);
  Flight* begun = flight.release();
  GroupTransport& group = *begun->group;
  group.begun_locked(begun);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    group.ended_locked(begun, request ? UCS_PTR_STATUS(request) : UCS_OK);
    return true;
  }
  wake();
  return false;
}

void ProcessPlane::on_sent(void* request, ucs_status_t status, void* data) {
  auto* flight = static_cast<Flight*>(data);
  flight->link->worker->api().ucp_request_free(request);
  if (!flight->group) {
    delete flight;
    return;
  }
  flight->group->ended_locked(flight, status);
}

ucs_status_t ProcessPlane::on_message(void* inbox, const void* header, size_t header_length, void* data,
                                      size_t length, const ucp_am_recv_param_t* param) {
  const auto& [plane, rail, kind] = *static_cast<Inbox*>(inbox);
  const auto head = read_header(header, header_length);
  if (!head) return UCS_OK;  // not one of ours
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    if (length > kFragmentBytes) return UCS_OK;
    // UCX must not be asked for it within its own callback.
    plane->announced_.push_back({*head, plane->rails_[rail].worker.get(), data, length, nullptr});
    return UCS_INPROGRESS;  // `data` stays valid
  }
  plane->arrived_locked(kind, *head, static_cast<const std::byte*>(data), length);
  return UCS_OK;
}

// Messages for a group that this process has not joined yet are bounded by credit: nothing is posted yet.
void ProcessPlane::arrived_locked(Kind kind, const Header& header, const std::byte* data, size_t nbytes) {
  const auto it = groups_.find(header.group);
  if (it != groups_.end()) {
    it->second->arrived_locked(kind, header, data, static_cast<int64_t>(nbytes));
  } else if (std::find(left_.begin(), left_.end(), header.group) == left_.end()) {
    auto& waiting = early_[header.group];
    if (waiting.size() < kEarlyMessages) waiting.push_back({kind, header, {data, data + nbytes}});
  }
}

// The buffer is the fetch's own until UCX is done with it, whatever becomes of the message meanwhile.
void ProcessPlane::fetch_locked(Fetch announced) {
  auto fetch = std::make_unique<Fetch>(std::move(announced));
  fetch->buffer = fragment_locked();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = on_fetched;
  param.user_data = fetch.get();
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  fetch->plane = this;
  void* request = api_.ucp_am_recv_data_nbx(fetch->worker->handle(), fetch->descriptor, fetch->buffer.get(),
                                            fetch->nbytes, &param);
  Fetch* begun = fetch.release();
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    fetched_locked(std::unique_ptr<Fetch>(begun), request ? UCS_PTR_STATUS(request) : UCS_OK);
  }
}

void ProcessPlane::on_fetched(void* request, ucs_status_t status, size_t /*length*/, void* data) {
  std::unique_ptr<Fetch> fetch(static_cast<Fetch*>(data));
  ProcessPlane& plane = *fetch->plane;
  plane.api_.ucp_request_free(request);
  plane.fetched_locked(std::move(fetch), status);
}

void ProcessPlane::fetched_locked(std::unique_ptr<Fetch> fetch, ucs_status_t status) {
  if (status == UCS_OK) arrived_locked(Kind::Data, fetch->header, fetch->buffer.get(), fetch->nbytes);
  give_back_locked(std::move(fetch->buffer));
}

// ---- progress ----

// The thread leaves all of it to the driver.
bool ProcessPlane::turn(Who who) {
  if (who == Who::Thread && keeper_ != Keeper::Thread) return false;
  {
    const std::lock_guard lock(mutex_);
    if (!turn_locked()) return false;
  }
  tell();
  changed_.notify_all();
  return true;
}

bool ProcessPlane::turn_locked() {
  bool busy = false;
  for (Rail& rail : rails_) busy = rail.worker->progress() || busy;
  for (Fetch& each : std::exchange(announced_, {})) fetch_locked(std::move(each));
  for (Link* each : std::exchange(broken_, {})) {
    const auto it = std::find_if(links_.begin(), links_.end(),
                                 [each](const auto& entry) { return entry.second.get() == each; });
    if (it == links_.end()) continue;
    const std::shared_ptr<Link> link = it->second;
    drop_links_locked(link->process);
    busy = true;
  }
  if (next_due_ <= Clock::now()) {
    next_due_ = TimePoint::max();
    for (auto& [id, group] : groups_) {
      group->look_locked(Clock::now());
      due_locked(group->due_locked());
    }
  }
  return busy || !ends_.empty() || !pumps_.empty();
}

bool ProcessPlane::arm(Who who) {
  if (who == Who::Thread && keeper_ != Keeper::Thread) return true;
  const std::lock_guard lock(mutex_);
  return !turn_locked() &&
         std::all_of(rails_.begin(), rails_.end(), [](Rail& rail) { return rail.worker->arm(); });
}

std::vector<int> ProcessPlane::fds() {
  std::vector<int> out;
  for (const Rail& rail : rails_) out.push_back(rail.worker->event_fd());
  return out;
}

// If the driver leaves at this moment, the thread checks once its grace is over.
void ProcessPlane::wake() { progress_->wake(keeper_ == Keeper::Driver ? Who::Driver : Who::Thread); }

// A thread that moves messages does not notify in every case: this checks again soon.
void ProcessPlane::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached) {
  while (!reached() && !stopped_) {
    wake();
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
}

void ProcessPlane::tell() {
  for (;;) {
    std::vector<End> ends;
    std::vector<Pump> pumps;
    {
      const std::lock_guard lock(mutex_);
      ends.swap(ends_);
      pumps.swap(pumps_);
    }
    if (ends.empty() && pumps.empty()) return;
    for (const Pump& pump : pumps) {
      try {
        pump.group->pump(pump.line);
      } catch (const std::bad_alloc&) {
        pump.group->starve(*pump.line);
      }
      const std::lock_guard lock(mutex_);
      pump.group->told_locked();
    }
    for (End& end : ends) {
      end.tell();
      end.message.reset();
      const std::lock_guard lock(mutex_);
      end.group->told_locked();
    }
  }
}

TimePoint ProcessPlane::due() {
  const std::lock_guard lock(mutex_);
  return next_due_;
}

}  // namespace meshcast::ucx
