#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/transport.h"

namespace meshcast {

// Point-to-point of any c10d backend; in practice a private ProcessGroupGloo. Peers are ranks of that
// backend. Facts about gloo that the executor relies on: send and recv only enqueue; completion is learnt by
// waiting and in no other way; messages match by tag; a send ends once its receive is posted.
std::shared_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace meshcast
