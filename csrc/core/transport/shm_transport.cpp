#include "transport/shm_transport.h"

#include <utility>

#include "transport/shm_receiver.h"
#include "transport/shm_sender.h"

namespace meshcast {
namespace {

class ShmTransport final : public LocalTransport {
 public:
  explicit ShmTransport(ShmMembership membership)
      : membership_(std::move(membership)), sender_(membership_), receiver_(membership_) {}

  ~ShmTransport() override { shutdown(); }

  void send(std::vector<LocalTarget> targets, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    sender_.send(std::move(targets), nbytes, std::move(message));
  }

  void recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    receiver_.recv(peer, key, nbytes, std::move(message));
  }

  void check_peers() override {
    for (size_t i = 0; i < membership_.links.size(); ++i) {
      if (!membership_.links[i]->gone()) continue;
      receiver_.mark_gone(i);
      sender_.mark_gone(i);
    }
  }

  void abort() noexcept override {
    sender_.abort();
    receiver_.abort();
  }

  void shutdown() override {
    abort();
    for (const auto& link : membership_.links) link->hang_up();
    // A message that arrives now may still be forwarded: the sender has to be there to refuse it.
    receiver_.shutdown();
    sender_.shutdown();
  }

 private:
  ShmMembership membership_;  // outlives the two, which use its memory
  ShmSender sender_;
  ShmReceiver receiver_;
};

}  // namespace

std::shared_ptr<LocalTransport> make_shm_transport(ShmMembership membership) {
  return std::make_shared<ShmTransport>(std::move(membership));
}

}  // namespace meshcast
