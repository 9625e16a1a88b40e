#include "c10d/fresh_tensor.h"

#include <atomic>
#include <memory>
#include <new>

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "memory/large_blocks.h"

namespace meshcast {
namespace {

std::atomic<bool> large_blocks_are_used{true};

struct LargeBlock {
  explicit LargeBlock(size_t nbytes) : memory(take_large_block(nbytes)), nbytes(nbytes) {
    c10::profiledCPUMemoryReporter().New(memory, nbytes);
  }
  ~LargeBlock() {
    c10::profiledCPUMemoryReporter().Delete(memory);
    give_large_block(memory, nbytes);
  }
  LargeBlock(const LargeBlock&) = delete;
  LargeBlock& operator=(const LargeBlock&) = delete;

  void* const memory;
  const size_t nbytes;
};

void free_block(void* block) { delete static_cast<LargeBlock*>(block); }

// The allocator that torch calls again when a storage is resized.
class LargeBlockAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes < kLargeBlock) return c10::GetDefaultCPUAllocator()->allocate(nbytes);
    try {
      auto block = std::make_unique<LargeBlock>(nbytes);
      void* const memory = block->memory;
      return {memory, block.release(), free_block, at::Device(at::kCPU)};
    } catch (const std::bad_alloc&) {
      return c10::GetDefaultCPUAllocator()->allocate(nbytes);  // needs less, and raises torch's own error
    }
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

LargeBlockAllocator* large_block_allocator() {
  static LargeBlockAllocator allocator;
  return &allocator;
}

}  // namespace

at::Tensor fresh_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  c10::Allocator* const allocator =
      large_blocks_are_used ? large_block_allocator() : c10::GetDefaultCPUAllocator();
  return at::detail::empty_generic(shape, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

void use_large_blocks(bool use) { large_blocks_are_used = use; }

}  // namespace meshcast
