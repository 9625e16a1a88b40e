#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/forks.h"
#include "transport/transport.h"
#include "transport/unix_socket.h"

namespace meshcast {

// Connects the ranks of a host, each with all others. Each listens on a unix socket whose name has no file that
// could be left behind. Every process of the host can read that name and connect. So a rank has to present a
// secret of the rank that it calls, which it has from the store, and to belong to the same user. A caller that
// does not, or sends nothing, is disconnected and delays no rank.
class LocalMeeting {
 public:
  LocalMeeting();  // listens; throws Error
  ~LocalMeeting();
  LocalMeeting(const LocalMeeting&) = delete;
  LocalMeeting& operator=(const LocalMeeting&) = delete;

  const std::string& address() const { return address_; }  // its name and its secret

  // The messages of one kind of meeting; all ranks must have the same version.
  struct Protocol {
    uint32_t magic;
    size_t bytes;
    size_t descriptors;   // sent with them, kMostDescriptors at most
    const char* purpose;  // for messages: "shared memory"
  };
  static constexpr size_t kMostDescriptors = 4;

  struct Greeting {
    std::vector<std::byte> bytes;
    std::vector<int> descriptors;
  };

  struct Peer {
    int32_t rank = -1;
    Descriptor socket;
    std::vector<std::byte> bytes;
    std::vector<Descriptor> descriptors;
  };

  // Connects this rank with all others of `addresses` (which holds this rank too); every one of them must call.
  // Returns them by ascending rank. Calls `checkpoint` every few milliseconds, which may throw. Throws Error:
  // of kind DeadlineExceeded past `deadline`, PeerLost where a rank has exited. To be called once.
  std::vector<Peer> meet(
      const std::map<int32_t, std::string>& addresses, int32_t rank, const Protocol& protocol,
      const std::function<Greeting(int32_t)>& greet, TimePoint deadline,
      const std::function<void()>& checkpoint = [] {});

 private:
  void stop_listening();

  const Origin origin_;
  std::string address_;
  Descriptor listener_;
};

}  // namespace meshcast
