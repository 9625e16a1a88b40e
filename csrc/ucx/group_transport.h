#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "transport/transport.h"
#include "ucx/link.h"
#include "ucx/plane.h"

namespace meshcast::ucx {

class ProcessPlane;

// Messages up to this size are sent at once, into a buffer of the receiver if it has not posted yet; larger
// ones wait for it. How many small ones may lie in such buffers is bounded: a sender that has not heard of any
// of the last kCredits that they were taken has its next ones wait as well.
inline constexpr int64_t kEagerBytes = 8 * 1024;
inline constexpr int32_t kCredits = 64;

// The messages of one private group. Whatever ends in `_locked`, and what UCX calls, is called with the lock of
// the plane held; ends of messages are then queued there.
class GroupTransport final : public Transport {
 public:
  GroupTransport(std::shared_ptr<ProcessPlane> plane, uint64_t id, std::vector<Address> members, int rank,
                 std::vector<int32_t> first_rail);
  ~GroupTransport() override { GroupTransport::shutdown(); }

  void send(const Envelope& to, const void* data, int64_t nbytes, std::unique_ptr<Message> message) override;
  void recv(const Envelope& from, void* data, int64_t nbytes, std::unique_ptr<Message> message) override;
  void drive(const std::function<bool()>& done, TimePoint limit) override;
  void wake() noexcept override;
  std::string lost(int peer) override;
  void abort() noexcept override;
  void shutdown() override;

  uint64_t id() const { return id_; }

  // A message is here: small ones with their bytes, others as what UCX calls them by.
  void arrived_locked(const DataHeader& header, const std::byte* data, int64_t nbytes);
  void announced_locked(const DataHeader& header, void* descriptor, int64_t nbytes, Worker& worker);
  void credit_locked(const CreditHeader& header);
  void left_locked(const LeaveHeader& header);
  void lost_locked(uint64_t process, const std::string& why);

  // Does what is due by now: see busy_until_ and Peer::leaves. When the next of it is, if ever.
  void look_locked(TimePoint now);
  TimePoint due_locked() const;

  void begun_locked(Flight* flight) { flights_.insert(flight); }
  void ended_locked(Flight* flight, ucs_status_t status);
  void told_locked();  // one of its queued ends

 private:
  struct Key {
    int32_t sender = -1;
    uint64_t key = 0;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<uint64_t>()(key.key * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(key.sender));
    }
  };
  struct Peer {
    int rank = -1;                        // in the group
    int32_t credits = kCredits;           // small messages that may go at once
    int32_t taken = 0;                    // small messages taken since the last credit
    int32_t left_rails = 0;               // on which it has said that it leaves
    bool told = false;                    // that this rank leaves
    std::string lost;                     // why nothing comes from there any more; empty while something may
    TimePoint leaves = TimePoint::max();  // when it counts as lost because it has left
    std::vector<std::unique_ptr<Message>> dropped;  // it has left, so they were not taken, whatever UCX says
  };
  struct Posted {
    std::byte* data = nullptr;
    int64_t nbytes = 0;
    std::unique_ptr<Message> message;
  };
  struct Arrival {
    std::vector<std::byte> data;  // of a small message
    void* descriptor = nullptr;   // of a large one
    int64_t nbytes = 0;
    Worker* worker = nullptr;
  };

  size_t rail_of(int peer, uint64_t key, int sender) const;
  std::shared_ptr<Link> link_locked(int peer, size_t rail, std::string* why);
  Peer& peer_at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  bool knows(int32_t peer) const { return peer >= 0 && peer < static_cast<int32_t>(peers_.size()); }
  void receive_locked(int peer, Posted posted, void* descriptor, Worker& worker);
  void matched_locked(int peer);
  void lose_locked(Peer& peer, const std::string& why);
  void say_leave_locked(Peer& peer);
  void close_busy_locked();
  void end_locked(int peer, std::unique_ptr<Message> message, std::optional<TransportError> error);
  static std::optional<TransportError> mismatch(int64_t nbytes, int64_t expected);

  const std::shared_ptr<ProcessPlane> plane_;
  const uint64_t id_;
  const std::vector<Address> members_;
  const int rank_;
  const std::vector<int32_t> first_rail_;

  std::unordered_map<Key, Posted, Hash> posted_;
  std::unordered_map<Key, Arrival, Hash> arrivals_;
  std::unordered_set<Flight*> flights_;
  std::vector<Peer> peers_;
  int64_t untold_ = 0;  // ends that are queued or being told
  bool aborted_ = false;
  bool shut_down_ = false;
  TimePoint busy_until_ = TimePoint::max();  // when connections that an abort left busy are closed
};

}  // namespace meshcast::ucx
