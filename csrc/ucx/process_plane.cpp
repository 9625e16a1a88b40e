#include "ucx/process_plane.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include <fmt/format.h>
#include <unistd.h>

#include "common/error.h"

namespace meshcast::ucx {
namespace {

constexpr auto kFlushLimit = std::chrono::seconds(2);
constexpr size_t kLeftGroups = 1024;     // whose late messages are known as such
constexpr size_t kEarlyMessages = 4096;  // kept for a group that is not joined yet

std::map<std::string, std::string> settings(const PlaneOptions& options) {
  // A peer is asked thrice before it counts as lost.
  const auto third = static_cast<int64_t>(std::max(1.0, options.peer_seconds / 3));
  const std::string interval = fmt::format("{}s", third);
  const std::string segment = fmt::format("{}", kSegmentBytes);
  return {
      {"TLS", "^sm,cuda,self"},  // of this host, and of no use here: they cannot tell that a peer died
      {"TCP_TX_SEG_SIZE", segment},
      {"TCP_RX_SEG_SIZE", segment},
      {"RNDV_SCHEME", "am"},  // others go on writing after an endpoint was closed
      {"MAX_RNDV_RAILS", "1"},
      {"MAX_EAGER_RAILS", "1"},  // the plan deals messages out to NICs
      {"TCP_KEEPIDLE", interval},
      {"TCP_KEEPINTVL", interval},
      {"TCP_KEEPCNT", "2"},
      {"KEEPALIVE_INTERVAL", interval},
      {"TCP_USER_TIMEOUT", fmt::format("{}s", 3 * third)},
  };
}

std::mutex plane_mutex;
std::weak_ptr<ProcessPlane> plane_of_process;  // guarded by plane_mutex

ucp_request_param_t sends(ucp_send_nbx_callback_t callback, void* data) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = callback;
  param.user_data = data;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

}  // namespace

std::shared_ptr<Plane> Plane::of_process(const PlaneOptions& options) {
  const std::lock_guard lock(plane_mutex);
  auto plane = plane_of_process.lock();
  if (plane && !plane->foreign()) return plane;
  plane = std::make_shared<ProcessPlane>(options);
  plane_of_process = plane;
  return plane;
}

ProcessPlane::ProcessPlane(const PlaneOptions& options) : pid_(getpid()), api_(load(options.library)) {
  std::random_device entropy;
  process_ = uint64_t{entropy()} << 32 | entropy();
  std::vector<int> events;
  rails_.reserve(options.devices.size());  // callbacks have their addresses
  for (const std::string& device : options.devices) {
    rails_.push_back({this, std::make_unique<Worker>(api_, device, settings(options))});
    rails_.back().worker->on_message(kDataMessage, on_data, &rails_.back());
    rails_.back().worker->on_message(kCreditMessage, on_credit, &rails_.back());
    rails_.back().worker->on_message(kLeaveMessage, on_leave, &rails_.back());
    events.push_back(rails_.back().worker->event_fd());
  }
  progress_ = std::make_unique<Progress>(mutex_, events,
                                         Progress::Calls{[this] { return turn(); }, [this] { return arm(); },
                                                         [this] { tell(); }, [this] { return due(); }});
}

ProcessPlane::~ProcessPlane() {
  if (foreign()) {  // threads, sockets and memory are the parent's
    for (Rail& rail : rails_) static_cast<void>(rail.worker.release());
    static_cast<void>(progress_.release());
    return;
  }
  progress_->stop();
  close_gently();
}

bool ProcessPlane::foreign() const { return getpid() != pid_; }

Address ProcessPlane::address() const {
  Address out;
  out.process = process_;
  for (const Rail& rail : rails_) out.rails.push_back(rail.worker->address());
  const std::lock_guard lock(mutex_);
  out.breaks = breaks_;
  return out;
}

std::shared_ptr<Transport> ProcessPlane::join(uint64_t id, std::vector<Address> members, int rank,
                                              std::vector<int32_t> first_rail) {
  auto group = std::make_shared<GroupTransport>(shared_from_this(), id, members, rank, std::move(first_rail));
  {
    const std::lock_guard lock(mutex_);
    settle_breaks_locked(members, rank, *group);
    groups_[id] = group.get();
    auto early = early_.extract(id);
    if (!early.empty()) {
      for (Early& each : early.mapped()) {
        if (each.descriptor) {
          announced_locked({each.header, each.descriptor, each.nbytes, each.worker});
        } else {
          group->arrived_locked(each.header, each.data.data(), each.nbytes);
        }
      }
    }
    auto leaves = early_leaves_.extract(id);
    if (!leaves.empty()) {
      for (const LeaveHeader& each : leaves.mapped()) group->left_locked(each);
    }
  }
  return group;
}

std::function<std::string()> ProcessPlane::watch(const Address& address) {
  // A connection also breaks where one end gave up on some group. So the first break is no answer, but that of
  // the connection made after it is: a dead process refuses it.
  return [plane = shared_from_this(), address, link = std::shared_ptr<Link>(), left = 2,
          why = std::string()]() mutable {
    if (plane->foreign() || address.process == plane->process_) return std::string();
    {
      const std::lock_guard lock(plane->mutex_);
      if (link && link->failure.empty()) return std::string();
      if (link) why = link->failure;
      if (left == 0) return why;
      --left;
      try {
        link = plane->link_locked(address.process, 0, address.rails.front());
      } catch (const Error& error) {
        link = nullptr;
        why = error.what();
      }
    }
    plane->progress_->wake();
    return std::string();
  };
}

GroupTransport* ProcessPlane::group(uint64_t id) const {
  const auto it = groups_.find(id);
  return it == groups_.end() ? nullptr : it->second;
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
  auto link = std::make_shared<Link>();
  link->worker = rails_[rail].worker.get();
  link->process = process;
  link->broken = &broken_;
  link->endpoint = link->worker->connect(address, on_lost, link.get());
  links_.emplace(std::pair{process, rail}, link);
  return link;
}

void ProcessPlane::on_lost(void* link, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  auto* lost = static_cast<Link*>(link);
  if (lost->failure.empty()) lost->failure = lost->worker->api().ucs_status_string(status);
  lost->broken->push_back(lost);
}

size_t ProcessPlane::rail_of(const Worker& worker) const {
  const auto it = std::find_if(rails_.begin(), rails_.end(),
                               [&](const Rail& rail) { return rail.worker.get() == &worker; });
  return static_cast<size_t>(it - rails_.begin());
}

void ProcessPlane::break_locked(Link& link, const std::string& why) {
  if (!link.failure.empty()) return;
  link.failure = why;
  broken_.push_back(&link);
}

// Ends what is in flight on a connection, at once and on this side alone, and tells all groups.
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

// All rails: a group is told of a process, and another group may connect with it again.
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

// A peer that closed a connection by force tells the other end nothing: messages to it would vanish. So before
// a new group uses what other groups have left, both ends compare how often they saw it broken. Where this end
// saw it once more since it told the others, they do not know.
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

// Lets go what is still under way, within a limit, and tells the peers that this process leaves.
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
  // What is left is ended by the worker's end, which in UCX 1.13 takes only what its owner has given back.
  for (void* request : requests) api_.ucp_request_free(request);
}

// ---- messages out ----

bool ProcessPlane::send_locked(std::unique_ptr<Flight> flight, const void* data, int64_t nbytes, bool small) {
  ucp_request_param_t param = sends(on_sent, flight.get());
  param.flags = (small ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV);
  constexpr std::array kinds{kDataMessage, kCreditMessage, kLeaveMessage};
  const unsigned kind = kinds[flight->header.index()];
  void* request = std::visit(
      [&](const auto& header) {
        return api_.ucp_am_send_nbx(flight->link->endpoint, kind, &header, sizeof(header), data,
                                    static_cast<size_t>(nbytes), &param);
      },
      flight->header);
  Flight* begun = flight.release();
  GroupTransport& group = *begun->group;
  group.begun_locked(begun);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    group.ended_locked(begun, request ? UCS_PTR_STATUS(request) : UCS_OK);
    return true;
  }
  progress_->wake();
  return false;
}

void ProcessPlane::on_sent(void* request, ucs_status_t status, void* data) {
  auto* flight = static_cast<Flight*>(data);
  flight->link->worker->api().ucp_request_free(request);
  flight->group->ended_locked(flight, status);
}

// ---- messages in ----

ucs_status_t ProcessPlane::on_data(void* rail, const void* header, size_t header_length, void* data,
                                   size_t length, const ucp_am_recv_param_t* param) {
  auto& [plane, worker] = *static_cast<Rail*>(rail);
  if (header_length != sizeof(DataHeader)) return UCS_OK;  // nobody of ours
  DataHeader head;
  std::memcpy(&head, header, sizeof(head));
  const auto nbytes = static_cast<int64_t>(length);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    plane->announced_.push_back({head, data, nbytes, worker.get()});
    return UCS_INPROGRESS;  // the descriptor stays valid
  }
  const auto* bytes = static_cast<const std::byte*>(data);
  if (GroupTransport* group = plane->group(head.group)) {
    group->arrived_locked(head, bytes, nbytes);
  } else {
    plane->keep_early_locked({head, {bytes, bytes + length}, nullptr, nbytes, worker.get()});
  }
  return UCS_OK;
}

ucs_status_t ProcessPlane::on_credit(void* rail, const void* header, size_t header_length, void* /*data*/,
                                     size_t /*length*/, const ucp_am_recv_param_t* /*param*/) {
  if (header_length != sizeof(CreditHeader)) return UCS_OK;
  CreditHeader head;
  std::memcpy(&head, header, sizeof(head));
  if (GroupTransport* group = static_cast<Rail*>(rail)->plane->group(head.group)) group->credit_locked(head);
  return UCS_OK;
}

ucs_status_t ProcessPlane::on_leave(void* rail, const void* header, size_t header_length, void* /*data*/,
                                    size_t /*length*/, const ucp_am_recv_param_t* /*param*/) {
  if (header_length != sizeof(LeaveHeader)) return UCS_OK;
  LeaveHeader head;
  std::memcpy(&head, header, sizeof(head));
  ProcessPlane& plane = *static_cast<Rail*>(rail)->plane;
  if (GroupTransport* group = plane.group(head.group)) {
    group->left_locked(head);
  } else if (!plane.has_left(head.group) && plane.early_leaves_[head.group].size() < kEarlyMessages) {
    plane.early_leaves_[head.group].push_back(head);
  }
  return UCS_OK;
}

bool ProcessPlane::has_left(uint64_t group) const {
  return std::find(left_.begin(), left_.end(), group) != left_.end();
}

void ProcessPlane::announced_locked(const Announced& announced) {
  if (GroupTransport* group = this->group(announced.header.group)) {
    group->announced_locked(announced.header, announced.descriptor, announced.nbytes, *announced.worker);
  } else {
    keep_early_locked({announced.header, {}, announced.descriptor, announced.nbytes, announced.worker});
  }
}

void ProcessPlane::keep_early_locked(Early early) {
  auto& waiting = early_[early.header.group];
  if (has_left(early.header.group) || waiting.size() >= kEarlyMessages) {
    if (early.descriptor) release_locked(*early.worker, early.descriptor);
    if (waiting.empty()) early_.erase(early.header.group);
    return;
  }
  waiting.push_back(std::move(early));
}

void ProcessPlane::receive_locked(std::unique_ptr<Flight> flight, void* descriptor, void* data,
                                  int64_t nbytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = on_received;
  param.user_data = flight.get();
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  void* request = api_.ucp_am_recv_data_nbx(flight->link->worker->handle(), descriptor, data,
                                            static_cast<size_t>(nbytes), &param);
  Flight* begun = flight.release();
  GroupTransport* group = begun->group;
  group->begun_locked(begun);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    group->ended_locked(begun, request ? UCS_PTR_STATUS(request) : UCS_OK);
  } else {
    progress_->wake();
  }
}

void ProcessPlane::on_received(void* request, ucs_status_t status, size_t /*length*/, void* data) {
  auto* flight = static_cast<Flight*>(data);
  flight->link->worker->api().ucp_request_free(request);
  flight->group->ended_locked(flight, status);
}

// ---- progress ----

bool ProcessPlane::turn() {
  bool busy = false;
  for (Rail& rail : rails_) busy = rail.worker->progress() || busy;
  for (const Announced& each : std::exchange(announced_, {})) announced_locked(each);
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
  return busy || !ends_.empty();
}

bool ProcessPlane::arm() {
  return std::all_of(rails_.begin(), rails_.end(), [](Rail& rail) { return rail.worker->arm(); });
}

void ProcessPlane::tell() {
  for (;;) {
    std::vector<End> ends;
    {
      const std::lock_guard lock(mutex_);
      ends.swap(ends_);
    }
    if (ends.empty()) return;
    for (End& end : ends) {
      end.tell();
      end.message.reset();
      const std::lock_guard lock(mutex_);
      end.group->told_locked();
    }
  }
}

TimePoint ProcessPlane::due() const { return std::min(next_due_, Clock::now() + std::chrono::hours(1)); }

}  // namespace meshcast::ucx
