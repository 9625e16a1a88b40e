#include "memory/large_blocks.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "catch.h"

using meshcast::give_large_block;
using meshcast::kept_large_bytes;
using meshcast::kKeptBytes;
using meshcast::kLargeBlock;
using meshcast::take_large_block;

namespace {

// Leaves one small block alone.
void forget_kept() { give_large_block(take_large_block(kKeptBytes + kLargeBlock), kKeptBytes + kLargeBlock); }

}  // namespace

TEST_CASE("a large block lies on a boundary, and all of it can be written") {
  for (const size_t nbytes : {kLargeBlock, kLargeBlock + 1, 3 * kLargeBlock - 4097, 5 * kLargeBlock}) {
    void* const block = take_large_block(nbytes);
    CHECK(reinterpret_cast<uintptr_t>(block) % kLargeBlock == 0);
    std::memset(block, 7, nbytes);
    give_large_block(block, nbytes);
  }
}

TEST_CASE("a freed block serves the next of its size and no other") {
  forget_kept();
  void* const first = take_large_block(2 * kLargeBlock);
  give_large_block(first, 2 * kLargeBlock);
  void* const other = take_large_block(3 * kLargeBlock);
  CHECK(other != first);
  CHECK(take_large_block(2 * kLargeBlock) == first);
  void* const second = take_large_block(2 * kLargeBlock);
  CHECK(second != first);
  for (void* const block : {first, second}) give_large_block(block, 2 * kLargeBlock);
  give_large_block(other, 3 * kLargeBlock);
}

TEST_CASE("no more is kept than its limit, or the block that was freed last") {
  forget_kept();
  CHECK(kept_large_bytes() == kKeptBytes + kLargeBlock);
  std::vector<void*> blocks;
  for (size_t i = 0; i < 2 * kKeptBytes / kLargeBlock; ++i) blocks.push_back(take_large_block(kLargeBlock));
  for (void* const block : blocks) {
    std::memset(block, 1, kLargeBlock);
    give_large_block(block, kLargeBlock);
    CHECK(kept_large_bytes() <= kKeptBytes);
  }
  CHECK(kept_large_bytes() == kKeptBytes);
  CHECK(take_large_block(kLargeBlock) == blocks.back());
  give_large_block(blocks.back(), kLargeBlock);
}
