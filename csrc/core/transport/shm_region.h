#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/shm_budget.h"
#include "transport/shm_mapping.h"

namespace meshcast {

inline constexpr uint32_t kMaxSlots = 8;
inline constexpr uint32_t kMaxLocalRanks = 64;
inline constexpr uint32_t kMaxPosts = 128;  // that a receiver may be ahead of the owner

// A piece of a message in a slot, as the sender announces it to each receiver.
struct Fragment {
  uint64_t key = 0;
  int64_t offset = 0;
  uint32_t slot = 0;
  uint32_t nbytes = 0;
};

// A receive that has been posted, as the receiver reports it to the sender.
struct Post {
  uint64_t key = 0;
  int64_t nbytes = 0;
};

// One producer, one consumer, in shared memory. Values from a peer are data, never trusted as an index or a
// count.
template <typename T, uint32_t kCapacity>
class ShmQueue {
 public:
  bool full() const { return tail_.load() - head_.load() >= kCapacity; }
  bool empty() const { return tail_.load() == head_.load(); }

  // True if no sequence of push() and pop() leads here: the other end cannot be trusted any longer.
  bool broken() const {
    const uint64_t head = head_.load();  // first: it only grows meanwhile, and so does the other
    return tail_.load() - head > kCapacity;
  }

  void push(const T& item) {  // not when full
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    items_[tail % kCapacity] = item;
    tail_.store(tail + 1);  // sequentially consistent: see Doorbell
  }

  bool pop(T* item) {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (tail_.load() == head) return false;  // sequentially consistent: see Mailbox::wanted
    *item = items_[head % kCapacity];
    head_.store(head + 1);
    return true;
  }

  // For the consumer, after pop(): whether the producer may have found the queue full before it. Together with
  // full() as in Doorbell: either the producer sees the room that pop() made, or this sees that it was full.
  bool was_full() const { return tail_.load() + 1 - head_.load(std::memory_order_relaxed) >= kCapacity; }

 private:
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::array<T, kCapacity> items_{};
};

// The shared memory of one rank: the slots that its messages pass through, and for each receiver a queue in
// either direction. A fragment occupies a slot, so fragments of one receiver never outnumber the slots.
struct ShmHeader {
  struct Mailbox {
    ShmQueue<Fragment, kMaxSlots> fragments;  // owner -> receiver
    ShmQueue<Post, kMaxPosts> posts;          // receiver -> owner
    // The owner has a message that waits for a post: only then is a post worth waking it. Set before it looks
    // for posts; the receiver posts before it looks here (as with Doorbell, one of them sees the other).
    std::atomic<uint32_t> wanted{0};
  };

  uint64_t magic = 0;
  uint32_t slots = 0;
  uint32_t slot_bytes = 0;
  uint32_t members = 0;
  // Slots freed since the beginning, and the count at which the owner wants to be notified.
  alignas(64) std::atomic<uint64_t> freed{0};
  std::atomic<uint64_t> wake_at{UINT64_MAX};
  struct alignas(64) Readers {
    std::atomic<uint32_t> left{0};  // receivers that have not yet copied this slot out
  };
  std::array<Readers, kMaxSlots> readers;
};

// The memory of one rank in one group.
class ShmRegion {
 public:
  // `members`: ranks that will read it. Takes its size out of the process's budget; throws std::runtime_error
  // with the reason.
  static std::unique_ptr<ShmRegion> create(uint32_t members);

  // Maps a peer's region, which has to serve `members` ranks at least. Checks everything that it will rely on.
  // Does not close `fd`.
  static std::unique_ptr<ShmRegion> open(int fd, uint32_t members);

  ShmRegion(const ShmRegion&) = delete;
  ShmRegion& operator=(const ShmRegion&) = delete;

  int fd() const { return memory_.fd(); }  // of a created region, until close_fd()
  void close_fd() { memory_.close_fd(); }

  ShmHeader& header() { return *static_cast<ShmHeader*>(memory_.base()); }
  ShmHeader::Mailbox& mailbox(uint32_t member);
  std::byte* slot(uint32_t index);
  uint32_t slots() const { return slots_; }
  uint32_t slot_bytes() const { return slot_bytes_; }

 private:
  ShmRegion() = default;

  ShmShare share_;  // of a created region
  ShmMapping memory_;
  // Copies of what the header said when it was checked: a peer cannot change them under us.
  uint32_t slots_ = 0;
  uint32_t slot_bytes_ = 0;
  uint32_t members_ = 0;
};

}  // namespace meshcast
