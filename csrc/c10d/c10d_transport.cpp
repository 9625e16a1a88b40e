#include "c10d/c10d_transport.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace meshcast {
namespace {

// gloo reports everything as text. What it says when a wait ran out of time is the only thing that tells
// that case from a lost connection.
TransportError::Cause classify(const std::string& text) {
  if (text.find("imed out") != std::string::npos) return TransportError::Cause::Timeout;
  if (text.find("abort") != std::string::npos) return TransportError::Cause::Aborted;
  return TransportError::Cause::Closed;
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

class C10dRequest final : public Request {
 public:
  explicit C10dRequest(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait(TimePoint deadline) override {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    bool through = false;
    try {
      // 0 ms would mean "for ever" here.
      through = work_->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      const std::string text = first_line(error);
      throw TransportError(classify(text), text);
    }
    if (!through) throw TransportError(TransportError::Cause::Aborted, "the request was aborted");
  }

  void abort() noexcept override {
    try {
      work_->abort();
    } catch (const std::exception&) {
      // Nothing left to abort: the wait ends by itself.
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

// A message that could not even be enqueued, since the connection had failed before: told at wait().
class FailedRequest final : public Request {
 public:
  explicit FailedRequest(TransportError error) : error_(std::move(error)) {}
  void wait(TimePoint) override { throw error_; }
  void abort() noexcept override {}

 private:
  TransportError error_;
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(std::vector<c10::intrusive_ptr<c10d::Backend>> rails, std::vector<int32_t> first_rail, int rank)
      : rails_(std::move(rails)), first_rail_(std::move(first_rail)), rank_(rank) {}

  std::unique_ptr<Request> send(int peer, int32_t tag, const void* data, int64_t nbytes) override {
    // The backend reads only; from_blob knows no const.
    std::vector<at::Tensor> tensors{bytes(const_cast<void*>(data), nbytes)};
    return guarded([&] { return rail(rank_, tag)->send(tensors, peer, tag); });
  }

  std::unique_ptr<Request> recv(int peer, int32_t tag, void* data, int64_t nbytes) override {
    std::vector<at::Tensor> tensors{bytes(data, nbytes)};
    return guarded([&] { return rail(peer, tag)->recv(tensors, peer, tag); });
  }

 private:
  const c10::intrusive_ptr<c10d::Backend>& rail(int sender, int32_t tag) const {
    const int32_t turn = first_rail_[static_cast<size_t>(sender)] + (tag & kTagNumber);
    return rails_[static_cast<size_t>(turn) % rails_.size()];
  }

  static at::Tensor bytes(void* data, int64_t nbytes) {
    return at::from_blob(data, {nbytes}, at::TensorOptions().dtype(at::kByte));
  }

  template <typename Issue>
  std::unique_ptr<Request> guarded(Issue issue) {
    try {
      return std::make_unique<C10dRequest>(issue());
    } catch (const std::exception& error) {
      const std::string text = first_line(error);
      return std::make_unique<FailedRequest>(TransportError(classify(text), text));
    }
  }

  const std::vector<c10::intrusive_ptr<c10d::Backend>> rails_;
  const std::vector<int32_t> first_rail_;
  const int rank_;
};

}  // namespace

std::shared_ptr<Transport> make_c10d_transport(std::vector<c10::intrusive_ptr<c10d::Backend>> rails,
                                               std::vector<int32_t> first_rail, int rank) {
  return std::make_shared<C10dTransport>(std::move(rails), std::move(first_rail), rank);
}

}  // namespace meshcast
