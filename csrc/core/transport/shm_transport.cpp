#include "transport/shm_transport.h"

#include <utility>

#include "common/forks.h"
#include "transport/shm_receiver.h"
#include "transport/shm_sender.h"

namespace meshcast {
namespace {

class ShmTransport final : public LocalTransport, public ShmProgress::Group {
 public:
  explicit ShmTransport(ShmMembership membership)
      : membership_(std::move(membership)), sender_(membership_), receiver_(membership_) {
    membership_.place->enter(*this);
  }

  ~ShmTransport() override { shutdown(); }

  void send(std::vector<LocalTarget> targets, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    sender_.send(std::move(targets), nbytes, std::move(message));
  }

  void recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    receiver_.recv(peer, key, nbytes, std::move(message));
  }

  std::vector<int> check_peers() override {
    std::vector<int> out;
    for (size_t i = 0; i < membership_.links.size(); ++i) {
      if (!membership_.links[i]->gone()) continue;
      receiver_.mark_gone(i);
      sender_.mark_gone(i);
      out.push_back(membership_.links[i]->rank());
    }
    return out;
  }

  bool turn(ShmHalf half, Who who) override {
    if (half == ShmHalf::Receiving) return receiver_.turn();
    // If both directions are in use, a driver leaves the sending to the process's thread.
    return sender_.turn([&] {
      if (who != Who::Driver || !receiver_.waits()) return false;
      progress().help();
      return true;
    });
  }

  Source* source() noexcept override { return &progress(); }

  void abort() noexcept override {
    sender_.abort();
    receiver_.abort();
  }

  void shutdown() override {
    // A forked child has this object but takes no part in the group.
    if (origin_.foreign() || std::exchange(down_, true)) return;
    abort();
    for (const auto& link : membership_.links) link->hang_up();
    membership_.place->leave();
    receiver_.finish();
    sender_.finish();
  }

 private:
  ShmProgress& progress() const { return membership_.place->progress(); }

  const Origin origin_;
  bool down_ = false;         // by the one thread that shuts it down
  ShmMembership membership_;  // outlives the two, which use its memory
  ShmSender sender_;
  ShmReceiver receiver_;
};

}  // namespace

std::shared_ptr<LocalTransport> make_shm_transport(ShmMembership membership) {
  return std::make_shared<ShmTransport>(std::move(membership));
}

}  // namespace meshcast
