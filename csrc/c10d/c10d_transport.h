#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/transport.h"

namespace meshcast {

// Point-to-point of any c10d backend; in practice a private ProcessGroupGloo. Peers are ranks of that backend.
// Facts about gloo that the executor relies on: send and recv only enqueue; only a wait shows completion;
// messages match by tag; a send ends once its receive is posted.
//
// `rails`: one backend for each network interface of a host, over the same ranks. Messages between two ranks
// take them in turns, so that any rank can use all interfaces of its host: those that rank r sends go by
// first_rail[r] where their tag is number 0 (kTagNumber), by the next one where it is 1, and so on. `rank` is
// this one.
std::shared_ptr<Transport> make_c10d_transport(std::vector<c10::intrusive_ptr<c10d::Backend>> rails,
                                               std::vector<int32_t> first_rail, int rank);

}  // namespace meshcast
