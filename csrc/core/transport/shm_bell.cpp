#include "transport/shm_bell.h"

#include <climits>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace meshcast {
namespace {

// Not the private flavour: the word is shared between processes.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  static_assert(sizeof(*word) == sizeof(uint32_t), "a futex is a bare 32-bit word");
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

void Bell::ring() {
  rings.fetch_add(1);
  futex(&rings, FUTEX_WAKE, INT_MAX);
}

void Bell::wait_while(uint32_t seen) { futex(&rings, FUTEX_WAIT, seen); }

}  // namespace meshcast
