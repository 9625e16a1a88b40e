#include "memory/large_blocks.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <new>

#include <sys/mman.h>
#include <unistd.h>

#include "common/of_process.h"

namespace meshcast {
namespace {

struct Block {
  void* memory = nullptr;
  size_t nbytes = 0;  // whole pages
};

// In the order of their release. An array, since freeing must not allocate memory.
struct Kept {
  std::mutex mutex;
  std::array<Block, kKeptBytes / kLargeBlock> blocks;
  size_t count = 0;
  size_t nbytes = 0;  // of all blocks

  Block remove_locked(size_t index) {
    const Block out = blocks[index];
    std::copy(blocks.begin() + index + 1, blocks.begin() + count, blocks.begin() + index);
    --count;
    nbytes -= out.nbytes;
    return out;
  }
};

PerProcess<Kept> kept_of_process;

size_t whole_pages(size_t nbytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (nbytes + page - 1) / page * page;
}

// A huge page begins at a multiple of its size. So the mapping is larger than the block by one page, and the
// rest is unmapped.
void* map_block(size_t nbytes) {
  void* const all =
      mmap(nullptr, nbytes + kLargeBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(all);
  const size_t before = (kLargeBlock - reinterpret_cast<uintptr_t>(begin) % kLargeBlock) % kLargeBlock;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + nbytes, kLargeBlock - before);
  madvise(begin + before, nbytes, MADV_HUGEPAGE);  // if this fails, small pages are used
  return begin + before;
}

// Unmaps the oldest blocks until the rest may stay.
void keep(const Block& block) {
  Kept& kept = kept_of_process.get();
  for (;;) {
    Block oldest;
    {
      const std::lock_guard lock(kept.mutex);
      const bool fits = kept.nbytes + block.nbytes <= kKeptBytes && kept.count < kept.blocks.size();
      if (fits || kept.count == 0) {
        kept.blocks[kept.count++] = block;
        kept.nbytes += block.nbytes;
        return;
      }
      oldest = kept.remove_locked(0);
    }
    munmap(oldest.memory, oldest.nbytes);
  }
}

}  // namespace

void* take_large_block(size_t nbytes) {
  nbytes = whole_pages(nbytes);
  Kept& kept = kept_of_process.get();
  {
    const std::lock_guard lock(kept.mutex);
    for (size_t i = kept.count; i-- > 0;)  // the last is the most likely to be in the caches
      if (kept.blocks[i].nbytes == nbytes) return kept.remove_locked(i).memory;
  }
  return map_block(nbytes);
}

void give_large_block(void* memory, size_t nbytes) noexcept {
  const Block block{memory, whole_pages(nbytes)};
  madvise(block.memory, block.nbytes, MADV_FREE);
  try {
    keep(block);
  } catch (const std::bad_alloc&) {  // in a forked child, which has kept nothing yet
    munmap(block.memory, block.nbytes);
  }
}

size_t kept_large_bytes() noexcept {
  Kept* const kept = kept_of_process.there();
  if (!kept) return 0;
  const std::lock_guard lock(kept->mutex);
  return kept->nbytes;
}

}  // namespace meshcast
