#pragma once

namespace meshcast::ucx {

// UCX does not know that a process forks. Its child would keep all of its sockets open, so that peers see the
// death of the parent only once the child has ended, too. So the child closes the descriptors of a worker,
// which it finds by the descriptor for the worker's events.

void close_in_children_of(int event_fd);  // throws Error
void gone(int event_fd);                  // the worker ends

// Throws Error in a process that was forked while its parent had workers: UCX lacks its own thread there.
void refuse_in_children();

}  // namespace meshcast::ucx
