#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/reshard_work.h"
#include "common/error.h"
#include "common/forks.h"
#include "transport/transport.h"

namespace meshcast {

// The names of a message in texts for the user. Ranks are global ones.
struct MessageLabel {
  bool sends = false;
  int32_t rank = -1;
  int32_t peer = -1;  // -1: a receive from any rank that has no message yet
  int32_t tag = 0;
  int64_t nbytes = 0;
};

// A point-to-point message, from the call to its end. Thread-safe; calls nothing except wake() of its
// transport.
class MessageState {
 public:
  // `memory`: the tensor, which goes when the message has ended.
  MessageState(MessageLabel label, std::shared_ptr<RecycleBin::Bag> memory)
      : label_(label), memory_(std::move(memory)) {}

  void end(std::exception_ptr error);  // the first end counts
  bool ended() const;
  std::exception_ptr error() const;

  // From here on a thread that waits drives this transport.
  void travels_over(const std::shared_ptr<Transport>& transport);

  // The message for a receive from any rank has come; both by their numbers, in the group and globally.
  void comes_from(int source, int32_t peer);
  int source() const;  // in the group

  // The error with which it ends if it fails, instead of the transport's.
  void decide(std::exception_ptr error);
  std::exception_ptr decided() const;

  // False: not ended by `limit`.
  bool wait_until(TimePoint limit);

  // An error about this message; `what` is the end of the sentence.
  Error problem(ErrorKind kind, const std::string& what, double limit = -1) const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  MessageLabel label_;
  std::shared_ptr<RecycleBin::Bag> memory_;
  std::weak_ptr<Transport> transport_;
  const TimePoint started_ = Clock::now();
  bool travels_ = false;
  bool driven_ = false;  // a thread may be asleep in the transport
  bool ended_ = false;
  int source_ = -1;
  std::exception_ptr error_;
  std::exception_ptr decided_;
};

class PointToPoint;

// The Work of a message. In contrast to gloo's it can be polled, and its errors are typed.
class MessageWork final : public c10d::Work {
 public:
  // limit: what wait() allows where it is given none.
  MessageWork(c10d::OpType op, const char* title, const at::Tensor& tensor, int rank,
              std::shared_ptr<MessageState> state, std::shared_ptr<PointToPoint> owner,
              std::chrono::milliseconds limit);

  bool isCompleted() override;
  bool isSuccess() const override { return !origin_.foreign() && state_->ended() && !state_->error(); }
  std::exception_ptr exception() const override { return origin_.foreign() ? nullptr : state_->error(); }
  int sourceRank() const override;
  void synchronize() override { wait(kNoTimeout); }
  // A limit of its own that expires leaves the message in flight, and so does an exception from the handler of
  // a signal. The group's limit ends it, and all others with that peer.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

 private:
  void close_record();

  const Origin origin_;
  const std::shared_ptr<MessageState> state_;
  const std::shared_ptr<PointToPoint> owner_;
  const std::chrono::milliseconds limit_;
};

}  // namespace meshcast
