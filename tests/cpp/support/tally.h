#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "transport/transport.h"

namespace meshcast::testing {

// Counts messages in flight, and what became of them.
class Tally {
 public:
  // Messages of memory; `scattered` ones do not say where it is.
  std::unique_ptr<Outgoing> out(const uint8_t* data, bool scattered = false) {
    begun();
    return std::make_unique<Out>(*this, data, scattered);
  }
  std::unique_ptr<Incoming> in(uint8_t* data) {
    begun();
    return std::make_unique<In>(*this, data);
  }
  std::unique_ptr<Message> told() {
    begun();
    return std::make_unique<Counted<Message>>(*this);
  }
  bool all_ended(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return left_ == 0; });
  }
  int failed() {
    const std::lock_guard lock(mutex_);
    return failed_;
  }
  std::string why() {  // the first failure
    const std::lock_guard lock(mutex_);
    return why_;
  }

 private:
  template <typename Kind>
  class Counted : public Kind {
   public:
    explicit Counted(Tally& tally) : tally_(tally) {}
    void finished() override { tally_.ended(""); }
    void failed(int /*peer*/, const TransportError& error) override { tally_.ended(error.what()); }

   private:
    Tally& tally_;
  };
  class Out final : public Counted<Outgoing> {
   public:
    Out(Tally& tally, const uint8_t* data, bool scattered)
        : Counted(tally), data_(data), scattered_(scattered) {}
    const std::byte* packed() override {
      return scattered_ ? nullptr : reinterpret_cast<const std::byte*>(data_);
    }
    void read(int64_t offset, int64_t nbytes, std::byte* out) override {
      if (nbytes > 0) std::memcpy(out, data_ + offset, static_cast<size_t>(nbytes));
    }

   private:
    const uint8_t* data_;
    const bool scattered_;
  };
  class In final : public Counted<Incoming> {
   public:
    In(Tally& tally, uint8_t* data) : Counted(tally), data_(data) {}
    void write(int64_t offset, int64_t nbytes, const std::byte* in) override {
      if (nbytes > 0) std::memcpy(data_ + offset, in, static_cast<size_t>(nbytes));
    }

   private:
    uint8_t* data_;
  };

  void begun() {
    const std::lock_guard lock(mutex_);
    ++left_;
  }
  void ended(const std::string& failure) {
    const std::lock_guard lock(mutex_);
    --left_;
    failed_ += failure.empty() ? 0 : 1;
    if (why_.empty()) why_ = failure;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int left_ = 0;
  int failed_ = 0;
  std::string why_;
};

}  // namespace meshcast::testing
