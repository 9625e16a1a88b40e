#pragma once

#include <memory>

#include "transport/local_transport.h"
#include "transport/shm_link.h"

namespace meshcast {

// Shared memory between the ranks of one host: a bounded set of slots for each sending rank, which all its
// receivers read. The process's ShmProgress moves them.
std::shared_ptr<LocalTransport> make_shm_transport(ShmMembership membership);

}  // namespace meshcast
