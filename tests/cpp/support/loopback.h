#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace meshcast {

// Ranks as threads of one process: the transport of the C++ tests, so that the executor runs under the
// sanitizers without processes. Sends are rendezvous, the harder of the two models.
// Returns one transport per rank; they share a mailbox that lives as long as any of them.
std::vector<std::shared_ptr<Transport>> make_loopback(int world_size);

// As if the process of `rank` died: its requests and all requests towards it fail with Cause::Closed.
void kill_loopback_rank(const std::shared_ptr<Transport>& any, int rank);

}  // namespace meshcast
