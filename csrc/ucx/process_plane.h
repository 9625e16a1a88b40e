#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/forks.h"
#include "transport/progress.h"
#include "ucx/api.h"
#include "ucx/group_transport.h"
#include "ucx/link.h"
#include "ucx/plane.h"
#include "ucx/worker.h"

namespace meshcast::ucx {

// The plane, and the source of its messages. One lock guards all of it, UCX included: calls into UCX are short,
// and none of them calls a message.
class ProcessPlane final : public Plane, public Source, public std::enable_shared_from_this<ProcessPlane> {
 public:
  explicit ProcessPlane(const PlaneOptions& options);
  ~ProcessPlane() override;

  // The process ends while groups still have the plane: UCX is closed in order, before its own destructors run
  // and while all that it calls is still there. Takes three seconds at most: a thread may be blocked in a
  // callback, and a peer may not answer.
  void end_with_process();

  // Nothing moves any longer. Answers whether no thread was in UCX by then.
  bool stop(TimePoint limit = TimePoint::max());

  Address address() const override;
  const std::string& version() const override { return api_.version; }
  std::shared_ptr<ProbingTransport> join(uint64_t id, std::vector<Address> members, int rank,
                                         std::vector<int32_t> first_rail) override;
  std::function<std::string()> watch(const Address& address) override;

  std::mutex& mutex() { return mutex_; }
  Progress& progress() override { return *progress_; }
  bool turn(Who who) override;
  bool arm(Who who) override;
  void kept_by(Keeper keeper) override { keeper_ = keeper; }
  TimePoint due() override;
  std::vector<int> fds() override;
  int patience() override { return 64; }  // arming costs a system call for each worker

  const Api& api() const { return api_; }

  // True in a child that was forked with the plane: it must not touch it.
  bool foreign() const { return origin_.foreign(); }

  void tell();  // without the lock: the ends that are queued
  void wake();  // for something that was begun. With the lock or without
  // Waits, with the lock held, until messages have made `reached` true, or stop().
  void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached);

  // With the lock held.
  std::shared_ptr<Link> link_locked(uint64_t process, size_t rail, const std::string& address);
  void break_locked(Link& link, const std::string& why);  // closes it in the next turn
  void leave_locked(uint64_t id);
  std::vector<std::shared_ptr<Link>> links_to_locked(uint64_t process) const;  // those that are whole
  void due_locked(TimePoint when) { next_due_ = std::min(next_due_, when); }
  void queue_locked(End end) { ends_.push_back(std::move(end)); }
  void queue_locked(Pump pump) { pumps_.push_back(std::move(pump)); }
  Fragment fragment_locked();
  void give_back_locked(Fragment fragment);
  // True if so many are in use that no line should take more than one: memory then grows with the peers by no
  // more than that one.
  bool many_fragments_locked() const { return fragments_in_use_ >= kManyFragments; }

  // Sends with UCX; what is not complete at once ends later. Answers whether it was.
  bool send_locked(std::unique_ptr<Flight> flight, const void* data, int64_t nbytes);

 private:
  struct Inbox {  // the argument of UCX's callback for messages
    ProcessPlane* plane = nullptr;
    size_t rail = 0;
    Kind kind = Kind::Data;
  };
  struct Rail {
    std::unique_ptr<Worker> worker;
    std::array<Inbox, kKinds> inboxes;
  };
  // A message for a group that this process has not joined yet.
  struct Early {
    Kind kind = Kind::Data;
    Header header;
    std::vector<std::byte> data;
  };

  // A fragment that a device writes into a buffer of ours, with RDMA.
  struct Fetch {
    Header header;
    Worker* worker = nullptr;
    void* descriptor = nullptr;  // UCX's name of it
    size_t nbytes = 0;
    Fragment buffer;
    ProcessPlane* plane = nullptr;
  };

  static ucs_status_t on_message(void* inbox, const void* header, size_t header_length, void* data,
                                 size_t length, const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* flight);
  static void on_fetched(void* request, ucs_status_t status, size_t length, void* fetch);
  static void on_lost(void* link, ucp_ep_h endpoint, ucs_status_t status);

  void close_locked(Link& link);
  void drop_links_locked(uint64_t process);
  void settle_breaks_locked(const std::vector<Address>& members, int rank, GroupTransport& group);
  bool turn_locked();
  void close_gently();
  void check_not_over_locked() const;
  void check_members(const std::vector<Address>& members, int rank,
                     const std::vector<int32_t>& first_rail) const;
  void arrived_locked(Kind kind, const Header& header, const std::byte* data, size_t nbytes);
  void fetch_locked(Fetch announced);
  void fetched_locked(std::unique_ptr<Fetch> fetch, ucs_status_t status);

  const Origin origin_;
  const Api& api_;
  const bool rdma_;  // see PlaneOptions
  uint64_t process_ = 0;

  mutable std::mutex mutex_;
  std::vector<Rail> rails_;
  std::map<std::pair<uint64_t, size_t>, std::shared_ptr<Link>> links_;  // by process and rail
  std::map<uint64_t, uint32_t> breaks_;                                 // see Address
  std::map<uint64_t, GroupTransport*> groups_;
  std::map<uint64_t, std::vector<Early>> early_;
  std::deque<uint64_t> left_;  // groups that this process has left, the last of them
  std::vector<Fetch> announced_;
  std::vector<Link*> broken_;
  TimePoint next_due_ = TimePoint::max();  // the earliest at which a group wants to be looked at
  std::vector<End> ends_;
  std::vector<Pump> pumps_;
  std::vector<Fragment> spare_;
  int fragments_in_use_ = 0;
  bool over_ = false;  // end_with_process() was called
  bool stopped_ = false;
  std::condition_variable changed_;  // an end was reported, stopped_
  std::atomic<Keeper> keeper_{Keeper::Thread};
  const std::shared_ptr<Progress> progress_;
};

}  // namespace meshcast::ucx
