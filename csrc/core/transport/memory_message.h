#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/transport.h"

namespace meshcast {

// Messages in one contiguous piece of memory, which report their end to another message.
class MemoryOut final : public Outgoing {
 public:
  MemoryOut(const void* data, std::unique_ptr<Message> told)
      : data_(static_cast<const std::byte*>(data)), told_(std::move(told)) {}
  const std::byte* packed() override { return data_; }
  void read(int64_t offset, int64_t nbytes, std::byte* out) override {
    if (nbytes > 0) std::memcpy(out, data_ + offset, static_cast<size_t>(nbytes));
  }
  void finished() override { told_->finished(); }
  void failed(int peer, const TransportError& error) override { told_->failed(peer, error); }

 private:
  const std::byte* data_;
  const std::unique_ptr<Message> told_;
};

class MemoryIn final : public Incoming {
 public:
  MemoryIn(void* data, std::unique_ptr<Message> told)
      : data_(static_cast<std::byte*>(data)), told_(std::move(told)) {}
  std::byte* packed() override { return data_; }
  void write(int64_t offset, int64_t nbytes, const std::byte* in) override {
    if (nbytes > 0) std::memcpy(data_ + offset, in, static_cast<size_t>(nbytes));
  }
  void finished() override { told_->finished(); }
  void failed(int peer, const TransportError& error) override { told_->failed(peer, error); }

 private:
  std::byte* data_;
  const std::unique_ptr<Message> told_;
};

}  // namespace meshcast
