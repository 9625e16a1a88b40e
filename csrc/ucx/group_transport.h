#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/transport.h"
#include "ucx/link.h"
#include "ucx/plane.h"

namespace meshcast::ucx {

class ProcessPlane;

// The messages of one private group. Functions that end in `_locked`, and callbacks of UCX, are called with the
// lock of the plane held, in which ends of messages are queued.
//
// An eager message is sent at once. So is the beginning of any other that is not posted yet, which announces
// it; the rest is sent once its receive is posted, in fragments, which are written to their place on arrival:
// nothing is written without a posted receive, or after it has ended. A sender without credit announces its
// message alone. A receiver that has all of a message that is not small acknowledges it.
class GroupTransport final : public ProbingTransport {
 public:
  GroupTransport(std::shared_ptr<ProcessPlane> plane, uint64_t id, std::vector<Address> members, int rank,
                 std::vector<int32_t> first_rail);
  ~GroupTransport() override { GroupTransport::shutdown(); }

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override;
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override;
  void probe(const Envelope& from, std::unique_ptr<Message> message) override;
  Source* source() noexcept override;
  std::string lost(int peer) override;
  void leave_because(const std::string& why) noexcept override;
  std::string told(int peer) override;
  bool anybody_told() const noexcept override { return anybody_told_.load(std::memory_order_relaxed); }
  void abort() noexcept override;
  void shutdown() override;

  uint64_t id() const { return id_; }

  // A message from another rank; `data` is nbytes long and goes with Kind::Data alone.
  void arrived_locked(Kind kind, const Header& header, const std::byte* data, int64_t nbytes);
  void abort_locked();
  void lost_locked(uint64_t process, const std::string& why);

  // Does the work that is due by now: see busy_until_ and Peer::leaves. due_locked(): when the next is due, if
  // ever.
  void look_locked(TimePoint now);
  TimePoint due_locked() const;

  void begun_locked(Flight* flight) { flights_.insert(flight); }
  void ended_locked(Flight* flight, ucs_status_t status);
  void told_locked();  // one of its queued ends, or pumps
  // Without the lock. Throws std::bad_alloc where there is no memory to pack a fragment in; starve() then ends
  // all that waits there.
  void pump(const std::shared_ptr<Line>& line);
  void starve(Line& line);

 private:
  struct Key {
    int32_t peer = -1;
    uint64_t key = 0;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<uint64_t>()(key.key * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(key.peer));
    }
  };
  struct Peer {
    int rank = -1;                        // in the group
    int64_t credit = 0;                   // bytes that may go there at once
    int64_t taken = 0;                    // bytes of its credit used here since some was given back
    int32_t left_rails = 0;               // on which it has sent Leave
    bool told = false;                    // that this rank leaves
    std::string lost;                     // why nothing comes from there any longer; empty while something may
    std::string cause;                    // that it sent when it left
    TimePoint leaves = TimePoint::max();  // when it counts as lost because it has left
  };
  struct Receiving {
    std::unique_ptr<Incoming> message;
    int64_t nbytes = 0;
    int64_t arrived = 0;  // bytes
    bool posted = false;  // the sender has been notified
  };
  struct Arrival {                // a message without a receive
    std::vector<std::byte> data;  // the bytes that were sent eagerly
    int64_t nbytes = 0;           // of the message
    bool announced = false;       // its sender waits for a post before it sends the rest
  };

  // Connections, in group_transport.cpp.
  size_t rail_of(int peer, uint64_t key, int sender) const;
  std::shared_ptr<Link> link_locked(int peer, size_t rail, std::string* why);
  std::shared_ptr<Link> link_for_locked(int peer, uint64_t key, int sender, std::string* why) {
    return link_locked(peer, rail_of(peer, key, sender), why);
  }
  Peer& peer_at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  bool leaves(int peer) { return peer_at(peer).leaves != TimePoint::max(); }
  bool knows(int32_t peer) const { return peer >= 0 && peer < static_cast<int32_t>(peers_.size()); }
  void say_locked(const std::shared_ptr<Link>& link, int peer, Kind kind, Header header, std::string text = {});
  void lose_locked(Peer& peer, const std::string& why);
  void say_leave_locked(Peer& peer);
  void left_locked(const Header& header, const std::byte* text, int64_t nbytes);
  void close_busy_locked();
  void end_locked(int peer, std::unique_ptr<Message> message, std::optional<TransportError> error);
  static std::optional<TransportError> mismatch(int64_t nbytes, int64_t expected);

  // Messages out, in messages_out.cpp.
  static Sending* front_locked(Line& line);
  bool may_send_locked(Line& line);  // one more fragment
  bool may_send_eagerly_locked(const Envelope& to, int64_t nbytes);
  Fragment pack(std::unique_lock<std::mutex>& lock, Outgoing& message, int64_t offset, int64_t nbytes);
  void announce_locked(Sending& sending);
  void post_arrived_locked(const Header& header);
  void taken_locked(const Header& header);
  void queue_pump_locked(const std::shared_ptr<Line>& line);
  void give_up_locked(const std::shared_ptr<Sending>& sending, const TransportError& error);
  void settle_locked(const std::shared_ptr<Sending>& sending);

  // Messages in, in messages_in.cpp.
  void data_locked(const Header& header, const std::byte* data, int64_t nbytes);
  void announced_locked(const Header& header);
  void post_locked(int peer, uint64_t key, Receiving& receiving);
  void credit_locked(int peer, int64_t nbytes);
  void answer_locked(int peer, uint64_t key, int64_t nbytes, int64_t expected);
  void arrive_locked(const Key& key, Arrival arrival);

  const std::shared_ptr<ProcessPlane> plane_;
  const uint64_t id_;
  const std::vector<Address> members_;
  const int rank_;
  const std::vector<int32_t> first_rail_;

  std::unordered_map<Key, std::shared_ptr<Sending>, Hash> sendings_;
  std::map<std::pair<int, const Link*>, std::shared_ptr<Line>> lines_;
  std::unordered_map<Key, int64_t, Hash>
      posts_;  // bytes of receives whose messages have not come to be sent yet
  std::unordered_map<Key, Receiving, Hash> receivings_;
  std::unordered_map<Key, Arrival, Hash> arrivals_;
  std::unordered_map<Key, std::unique_ptr<Message>, Hash> probes_;
  std::unordered_set<Flight*> flights_;
  std::vector<Peer> peers_;
  int64_t untold_ = 0;  // ends and pumps that are queued or under way
  std::string leaves_because_;
  std::atomic<bool> anybody_told_{false};
  bool aborted_ = false;
  bool shut_down_ = false;
  TimePoint busy_until_ = TimePoint::max();  // when connections that an abort left busy are closed
};

}  // namespace meshcast::ucx
