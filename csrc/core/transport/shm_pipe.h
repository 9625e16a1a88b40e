#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "transport/shm_budget.h"
#include "transport/shm_mapping.h"
#include "transport/shm_region.h"
#include "transport/transport.h"

namespace meshcast {

// One direction between two ranks of a host: a ring of records in memory of the rank that writes them, and the
// answers of the one that reads them. Values from the other end are data: they are checked, and a pipe with
// invalid ones is broken for good.
class ShmPipe {
 public:
  enum class Kind : uint32_t {
    Begin,     // the first bytes of a message, sent eagerly; all of a small one
    Announce,  // a message waits for its receive; no bytes of it
    Piece      // bytes of a message that was posted
  };
  // Goes in front of the bytes.
  struct Record {
    uint64_t key = 0;
    int64_t nbytes = 0;  // of the message
    int64_t offset = 0;  // of these bytes in it
    uint32_t count = 0;  // of these bytes
    Kind kind = Kind::Begin;
  };
  struct Answer {
    static constexpr int64_t kTaken = -1;  // the reader has all of the message
    uint64_t key = 0;
    int64_t nbytes = 0;  // of a receive that waits for its message, or kTaken
  };
  static constexpr uint32_t kMaxAnswers = 128;
  // Messages up to this size end once their memory may be used again, as over a network.
  static constexpr int64_t kSmallBytes = 8 * 1024;
  // Eager bytes that may wait at the reader, where a message counts as a small one at least.
  static constexpr uint64_t kCreditBytes = 1024 * 1024;
  static uint64_t credit_of(uint32_t count) { return std::max<uint64_t>(count, kSmallBytes); }

  struct Header {
    uint64_t magic = 0;
    uint64_t capacity = 0;
    alignas(64) std::atomic<uint64_t> tail{0};      // bytes written since the beginning
    std::atomic<uint32_t> starved{0};               // the writer waits for room, and is to be called
    alignas(64) std::atomic<uint64_t> head{0};      // bytes read
    std::atomic<uint64_t> taken{0};                 // of the eager bytes, as credit
    alignas(64) std::atomic<uint32_t> awaited{0};   // the reader waits for something: records are worth a call
    alignas(64) std::atomic<uint32_t> answered{0};  // the writer waits: answers are worth a call
    ShmQueue<Answer, kMaxAnswers> answers;
  };

  // The pipe in which this rank writes. Takes its size out of the process's budget; throws std::runtime_error.
  static std::unique_ptr<ShmPipe> create();
  // The pipe of a peer. Checks everything that it will rely on. Does not close `fd`.
  static std::unique_ptr<ShmPipe> open(int fd);

  int fd() const { return memory_.fd(); }  // of a created one, until close_fd()
  void close_fd() { memory_.close_fd(); }
  Header& header() { return *static_cast<Header*>(memory_.base()); }

  // For the writer, one thread at a time.
  int64_t most() const { return capacity_ / 4 - kAlign; }  // bytes of a record, so that a few fit in
  bool has_room(int64_t count);                            // for a record of so many bytes, at most most()
  void write(const Record& record, Outgoing& message);     // has_room() for it

  // For the reader, one thread at a time.
  std::optional<Record> read();                        // the first record, none where there is none
  void copy(const Record& record, Incoming& message);  // its bytes, to their place
  void remove(const Record& record);
  bool mostly_free();

  bool broken() const { return broken_; }

 private:
  static constexpr int64_t kAlign = 64;
  static constexpr int64_t kHead = 32;  // bytes in front of those of the message
  static_assert(sizeof(Record) == kHead);

  ShmPipe() = default;
  static int64_t size_of(int64_t count) { return (kHead + count + kAlign - 1) / kAlign * kAlign; }
  std::byte* at(uint64_t position) {
    return static_cast<std::byte*>(memory_.base()) + sizeof(Header) + position % capacity_u();
  }
  uint64_t capacity_u() const { return static_cast<uint64_t>(capacity_); }
  // Calls `call` for the one or two parts of a record's bytes: where, from which of them on, and how many.
  template <typename Call>
  void parts(int64_t count, const Call& call);

  ShmShare share_;  // of a created one
  ShmMapping memory_;
  int64_t capacity_ = 0;   // as it was when it was checked
  uint64_t position_ = 0;  // the next record, for either end; the peer cannot change it
  bool broken_ = false;
};

}  // namespace meshcast
