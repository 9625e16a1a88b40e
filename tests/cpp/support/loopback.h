#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace meshcast {

// Ranks as threads of one process: the transport of the C++ tests, so that the executor runs under the
// sanitizers without processes. Sends are rendezvous, the harder of the two models.
// Returns one transport per rank; they share a mailbox that lives as long as any of them.
std::vector<std::shared_ptr<Transport>> make_loopback(int world_size);

// As if the process of `rank` died: its requests and all requests towards it fail with Cause::Closed.
void kill_loopback_rank(const std::shared_ptr<Transport>& any, int rank);

// Messages that hand everything to another one, but their ends to `on_end`, with what tells the other.
using OnEnd = std::function<void(std::function<void()> tell)>;
std::unique_ptr<Outgoing> with_end(std::unique_ptr<Outgoing> message, OnEnd on_end);
std::unique_ptr<Incoming> with_end(std::unique_ptr<Incoming> message, OnEnd on_end);

// Hands everything to another transport; tests override what they watch.
class PassingTransport : public Transport {
 public:
  explicit PassingTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    inner_->send(to, nbytes, std::move(message));
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    inner_->recv(from, nbytes, std::move(message));
  }
  Source* source() noexcept override { return inner_->source(); }
  void abort() noexcept override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }

 private:
  const std::shared_ptr<Transport> inner_;
};

}  // namespace meshcast
