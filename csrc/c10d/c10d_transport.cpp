#include "c10d/c10d_transport.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "common/error.h"
#include "common/fault_point.h"
#include "common/thread_name.h"
#include "run/channel.h"
#include "run/run.h"

namespace meshcast {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Longer than any call: the watcher ends those that are past their limit, and aborts the wait with them.
constexpr auto kForEver = std::chrono::milliseconds(std::chrono::hours(24 * 365));

// gloo reports everything as text. Only its text distinguishes a wait that ran out of time from a lost
// connection.
TransportError::Cause classify(const std::string& text) {
  if (text.find("imed out") != std::string::npos) return TransportError::Cause::Timeout;
  if (text.find("abort") != std::string::npos) return TransportError::Cause::Aborted;
  return TransportError::Cause::Closed;
}

TransportError error_of(const std::exception& error) {
  const std::string text = error.what();
  const std::string line = text.substr(0, text.find('\n'));
  return {classify(line), line};
}

void check_rails(size_t count, const std::vector<int32_t>& first_rail) {
  const bool fits = std::all_of(first_rail.begin(), first_rail.end(),
                                [&](int32_t rail) { return rail >= 0 && static_cast<size_t>(rail) < count; });
  if (!fits) {
    throw LayoutError(fmt::format("each rank of a group needs a rail from 0 to {}, found [{}]", count - 1,
                                  fmt::join(first_rail, ", ")));
  }
}

const TransportError kAborted(TransportError::Cause::Aborted, "the transport was aborted");

// Messages of one lane and direction with one peer, in the order in which they were posted. gloo can only be
// waited for, not polled: a thread waits for the front one. After a failure nothing is waited for any longer,
// since gloo has closed the connection; the rest ends with abort().
class WaitLine {
 public:
  explicit WaitLine(int peer) : peer_(peer) {
    try {
      thread_ = std::thread([this] {
        name_this_thread("mc-gloo");
        loop();
      });
    } catch (const std::system_error& error) {
      throw std::runtime_error(no_thread("messages over gloo", error));
    }
  }

  void join() { thread_.join(); }  // after abort()

  // issue(data): enqueues the message at gloo, which wants it as one piece of memory.
  template <typename Issue>
  void send(int64_t nbytes, std::unique_ptr<Outgoing> message, const Issue& issue) {
    Waiting waiting;
    const std::byte* data = message->packed();
    if (!data) {
      waiting.staging = take_staging(nbytes);
      message->read(0, nbytes, waiting.staging.data());
      data = waiting.staging.data();
    }
    waiting.message = std::move(message);
    // The backend reads only; from_blob knows no const.
    post(std::move(waiting), [&] { return issue(const_cast<std::byte*>(data)); });
  }

  template <typename Issue>
  void recv(int64_t nbytes, std::unique_ptr<Incoming> message, const Issue& issue) {
    Waiting waiting;
    std::byte* data = message->packed();
    if (!data) {
      waiting.staging = take_staging(nbytes);
      waiting.into = message.get();
      data = waiting.staging.data();
    }
    waiting.message = std::move(message);
    post(std::move(waiting), [&] { return issue(data); });
  }

  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    for (const Waiting& each : waiting_) abort(each);
    if (front_) abort(*front_);
    changed_.notify_all();
  }

 private:
  struct Waiting {
    WorkPtr work;
    std::unique_ptr<Message> message;
    std::vector<std::byte> staging;
    Incoming* into = nullptr;  // the message, to which `staging` is written in the end
    std::optional<TransportError> error;
  };

  template <typename Issue>
  void post(Waiting waiting, const Issue& issue) {
    {
      const std::lock_guard lock(mutex_);
      if (!aborted_) {
        try {
          waiting.work = issue();
        } catch (const std::bad_alloc&) {
          throw;                                 // no word of the connection
        } catch (const std::exception& error) {  // the connection had failed before
          waiting.error = error_of(error);
        }
        waiting_.push_back(std::move(waiting));
        changed_.notify_all();
        return;
      }
    }
    waiting.message->failed(peer_, kAborted);
  }

  std::vector<std::byte> take_staging(int64_t nbytes) {
    std::vector<std::byte> staging;
    {
      const std::lock_guard lock(mutex_);
      if (!spare_.empty()) {
        staging = std::move(spare_.back());
        spare_.pop_back();
      }
    }
    staging.resize(static_cast<size_t>(nbytes));
    return staging;
  }

  static void abort(const Waiting& waiting) noexcept {
    try {
      if (waiting.work) waiting.work->abort();
    } catch (const std::exception&) {
      // Nothing left to abort: the wait ends by itself.
    }
  }

  static std::optional<TransportError> wait(const Waiting& waiting) {
    if (waiting.error) return waiting.error;
    try {
      if (waiting.work->wait(kForEver)) return std::nullopt;
    } catch (const std::exception& error) {
      return error_of(error);
    }
    return kAborted;
  }

  void loop() {
    std::unique_lock lock(mutex_);
    bool failed = false;
    for (;;) {
      changed_.wait(lock, [&] { return aborted_ || (!failed && !waiting_.empty()); });
      if (waiting_.empty()) return;  // aborted, and all ends are reported
      Waiting front = std::move(waiting_.front());
      waiting_.pop_front();
      if (failed) {
        lock.unlock();
        front.work.reset();
        front.message->failed(peer_, kAborted);
      } else {
        front_ = &front;
        lock.unlock();
        const std::optional<TransportError> error = wait(front);
        lock.lock();
        front_ = nullptr;
        failed = error.has_value();
        lock.unlock();
        front.work.reset();  // gloo releases the memory
        if (error) {
          front.message->failed(peer_, *error);
        } else {
          if (front.into)
            front.into->write(0, static_cast<int64_t>(front.staging.size()), front.staging.data());
          front.message->finished();
        }
      }
      front.message.reset();
      lock.lock();
      if (front.staging.capacity() > 0 && spare_.size() < kWindow) spare_.push_back(std::move(front.staging));
    }
  }

  const int peer_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  const Waiting* front_ = nullptr;             // what the thread waits for
  std::vector<std::vector<std::byte>> spare_;  // staging to reuse, at most kWindow
  bool aborted_ = false;
  std::thread thread_;
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(std::vector<c10::intrusive_ptr<c10d::Backend>> rails, std::vector<int32_t> first_rail, int rank)
      : rails_(std::move(rails)), first_rail_(std::move(first_rail)), rank_(rank) {}
  ~C10dTransport() override { C10dTransport::shutdown(); }

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    const int32_t tag = short_key(to.key);
    const auto line = line_of(to, Direction::Out);
    if (!line) return message->failed(to.peer, kAborted);
    line->send(nbytes, std::move(message), [&](std::byte* data) {
      std::vector<at::Tensor> tensors{bytes(data, nbytes)};
      return rail(rank_, tag)->send(tensors, to.peer, tag);
    });
  }

  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    const int32_t tag = short_key(from.key);
    const auto line = line_of(from, Direction::In);
    if (!line) return message->failed(from.peer, kAborted);
    line->recv(nbytes, std::move(message), [&](std::byte* data) {
      std::vector<at::Tensor> tensors{bytes(data, nbytes)};
      return rail(from.peer, tag)->recv(tensors, from.peer, tag);
    });
  }

  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (auto& [key, line] : lines_) line->abort();
  }

  void shutdown() override {
    abort();
    std::map<LineKey, std::shared_ptr<WaitLine>> lines;
    {
      const std::lock_guard lock(mutex_);
      lines.swap(lines_);
    }
    for (const auto& [key, line] : lines) line->join();
  }

 private:
  enum class Direction : uint8_t { In, Out };
  using LineKey = std::tuple<int, int32_t, Direction>;  // peer, lane

  const c10::intrusive_ptr<c10d::Backend>& rail(int sender, int32_t tag) const {
    const int32_t turn = first_rail_[static_cast<size_t>(sender)] + (tag & 0xFF);
    return rails_[static_cast<size_t>(turn) % rails_.size()];
  }

  static at::Tensor bytes(void* data, int64_t nbytes) {
    return at::from_blob(data, {nbytes}, at::TensorOptions().dtype(at::kByte));
  }

  std::shared_ptr<WaitLine> line_of(const Envelope& envelope, Direction direction) {  // null after abort()
    const std::lock_guard lock(mutex_);
    if (aborted_) return nullptr;
    auto& line = lines_[{envelope.peer, envelope.lane, direction}];
    if (!line) line = std::make_shared<WaitLine>(envelope.peer);
    return line;
  }

  const std::vector<c10::intrusive_ptr<c10d::Backend>> rails_;
  const std::vector<int32_t> first_rail_;
  const int rank_;
  std::mutex mutex_;
  std::map<LineKey, std::shared_ptr<WaitLine>> lines_;
  bool aborted_ = false;
};

}  // namespace

std::shared_ptr<Transport> make_c10d_transport(std::vector<c10::intrusive_ptr<c10d::Backend>> rails,
                                               std::vector<int32_t> first_rail, int rank) {
  MC_FAULT_POINT("join");
  check_rails(rails.size(), first_rail);
  return std::make_shared<C10dTransport>(std::move(rails), std::move(first_rail), rank);
}

}  // namespace meshcast
