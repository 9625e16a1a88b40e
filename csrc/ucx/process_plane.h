#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "ucx/api.h"
#include "ucx/group_transport.h"
#include "ucx/link.h"
#include "ucx/plane.h"
#include "ucx/progress.h"
#include "ucx/worker.h"

namespace meshcast::ucx {

// The plane. One lock guards all of it, UCX included: calls into UCX are short, and none of them calls a
// message.
class ProcessPlane final : public Plane, public std::enable_shared_from_this<ProcessPlane> {
 public:
  explicit ProcessPlane(const PlaneOptions& options);
  ~ProcessPlane() override;

  Address address() const override;
  const std::string& version() const override { return api_.version; }
  std::shared_ptr<Transport> join(uint64_t id, std::vector<Address> members, int rank,
                                  std::vector<int32_t> first_rail) override;
  std::function<std::string()> watch(const Address& address) override;

  std::mutex& mutex() { return mutex_; }
  Progress& progress() { return *progress_; }
  const Api& api() const { return api_; }

  // Whether this is a child that was forked with the plane: it must not touch it.
  bool foreign() const;

  void tell();  // without the lock: the ends that are queued

  // With the lock held.
  std::shared_ptr<Link> link_locked(uint64_t process, size_t rail, const std::string& address);
  size_t rail_of(const Worker& worker) const;
  void break_locked(Link& link, const std::string& why);  // closes it in the next turn
  void leave_locked(uint64_t id);
  std::vector<std::shared_ptr<Link>> links_to_locked(uint64_t process) const;  // those that are whole
  void due_locked(TimePoint when) { next_due_ = std::min(next_due_, when); }
  void queue_locked(End end) { ends_.push_back(std::move(end)); }
  void release_locked(Worker& worker, void* descriptor) {
    api_.ucp_am_data_release(worker.handle(), descriptor);
  }

  // Sends with UCX; what is not through at once is told later. Answers whether it was.
  bool send_locked(std::unique_ptr<Flight> flight, const void* data, int64_t nbytes, bool small);
  void receive_locked(std::unique_ptr<Flight> flight, void* descriptor, void* data, int64_t nbytes);

 private:
  struct Rail {
    ProcessPlane* plane = nullptr;
    std::unique_ptr<Worker> worker;
  };
  // An announced message that UCX must not be asked for while it tells of it.
  struct Announced {
    DataHeader header;
    void* descriptor = nullptr;
    int64_t nbytes = 0;
    Worker* worker = nullptr;
  };
  // What came for a group that this process has not joined yet.
  struct Early {
    DataHeader header;
    std::vector<std::byte> data;
    void* descriptor = nullptr;
    int64_t nbytes = 0;
    Worker* worker = nullptr;
  };

  static ucs_status_t on_data(void* rail, const void* header, size_t header_length, void* data, size_t length,
                              const ucp_am_recv_param_t* param);
  static ucs_status_t on_credit(void* rail, const void* header, size_t header_length, void* data, size_t length,
                                const ucp_am_recv_param_t* param);
  static ucs_status_t on_leave(void* rail, const void* header, size_t header_length, void* data, size_t length,
                               const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* flight);
  static void on_received(void* request, ucs_status_t status, size_t length, void* flight);
  static void on_lost(void* link, ucp_ep_h endpoint, ucs_status_t status);

  void close_locked(Link& link);
  void drop_links_locked(uint64_t process);
  void settle_breaks_locked(const std::vector<Address>& members, int rank, GroupTransport& group);
  bool turn();
  bool arm();
  TimePoint due() const;
  void close_gently();
  GroupTransport* group(uint64_t id) const;
  bool has_left(uint64_t group) const;
  void announced_locked(const Announced& announced);
  void keep_early_locked(Early early);

  const pid_t pid_;
  const Api& api_;
  uint64_t process_ = 0;

  mutable std::mutex mutex_;
  std::vector<Rail> rails_;
  std::map<std::pair<uint64_t, size_t>, std::shared_ptr<Link>> links_;  // by process and rail
  std::map<uint64_t, uint32_t> breaks_;                                 // see Address
  std::map<uint64_t, GroupTransport*> groups_;
  std::map<uint64_t, std::vector<Early>> early_;
  std::map<uint64_t, std::vector<LeaveHeader>> early_leaves_;
  std::deque<uint64_t> left_;  // groups that this process has left, the last of them
  std::vector<Announced> announced_;
  std::vector<Link*> broken_;
  TimePoint next_due_ = TimePoint::max();  // the earliest at which a group wants to be looked at
  std::vector<End> ends_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace meshcast::ucx
