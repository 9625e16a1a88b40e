#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace meshcast::ucx {

// The address of a process: its number, and the address of its worker on each rail.
struct Address {
  uint64_t process = 0;  // drawn when its plane is made
  std::vector<std::string> rails;
  std::map<uint64_t, uint32_t> breaks;  // by process: how often the connections with it have been broken by now
};

struct PlaneOptions {
  std::string library;               // path of libucp, or its name
  std::vector<std::string> devices;  // a rail for each, as UCX names them; {""}: one rail, UCX's choice
  double peer_seconds = 60;          // within which a peer that the network has lost is noticed
  bool rdma = false;                 // the host has devices that move memory by themselves
};

// All that a process has of UCX: a worker for each rail, the connections to other processes, and one thread
// that drives them. Shared by all private groups; made by the first and destroyed with the last.
class Plane {
 public:
  // The plane of this process. Made with these options if there is none, else they change nothing.
  // Throws Error.
  static std::shared_ptr<Plane> of_process(const PlaneOptions& options);

  virtual ~Plane() = default;
  virtual Address address() const = 0;
  virtual const std::string& version() const = 0;

  // The version of the messages that this build sends: ranks of different versions cannot communicate.
  static uint32_t wire_version();

  // The connections of a group. Throws LayoutError if the values from the ranks do not fit. id: the same on all
  // its ranks, and of no other group ever. members: by rank in the group. first_rail: by rank, of its first
  // message to any other; the next takes the next one.
  virtual std::shared_ptr<ProbingTransport> join(uint64_t id, std::vector<Address> members, int rank,
                                                 std::vector<int32_t> first_rail) = 0;

  // For ranks that wait for a process with which they have no group yet: returns, whenever it is called, why
  // that process cannot be reached any longer; "" as long as this is not known.
  virtual std::function<std::string()> watch(const Address& address) = 0;
};

}  // namespace meshcast::ucx
