#include "transport/shm_pair.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/forks.h"
#include "transport/shm_pair_receiver.h"
#include "transport/shm_pair_sender.h"

namespace meshcast {
namespace {

// What the two tell each other: the sender's number on its bell. Its pipe and its process's bell travel along.
constexpr LocalMeeting::Protocol kPairProtocol{0x6d637031, sizeof(uint32_t), 1 + ShmBell::kFds,
                                               "shared memory"};

class ShmPair final : public ProbingTransport, public ShmProgress::Group {
 public:
  ShmPair(std::unique_ptr<ShmProgress::Place> place, std::unique_ptr<ShmPipe> out, std::unique_ptr<ShmPipe> in,
          std::unique_ptr<ShmPeer> peer)
      : place_(std::move(place)),
        out_(std::move(out)),
        in_(std::move(in)),
        peer_(std::move(peer)),
        sender_(*place_, *out_, *peer_),
        receiver_(*place_, *in_, *peer_) {
    for (const int fd : peer_->fds()) place_->watch(fd);
    alarmed_ = true;  // it may have gone before
    place_->enter(*this);
  }

  ~ShmPair() override { ShmPair::shutdown(); }

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    sender_.send(to.key, nbytes, std::move(message));
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    receiver_.recv(from.key, nbytes, std::move(message));
  }
  void probe(const Envelope& from, std::unique_ptr<Message> message) override {
    receiver_.probe(from.key, std::move(message));
  }

  Source* source() noexcept override { return &place_->progress(); }

  bool turn(ShmHalf half, Who who) override {
    if (alarmed_.exchange(false) && peer_->gone()) {
      sender_.mark_gone();
      receiver_.mark_gone();
    }
    if (half == ShmHalf::Receiving) return receiver_.turn();
    // Where both directions are in use, who drives leaves the sending to the process's thread.
    return sender_.turn([&] {
      if (who != Who::Driver || !receiver_.waits()) return false;
      place_->progress().help();
      return true;
    });
  }
  void alarmed() override { alarmed_ = true; }

  // The peer sees it at once: what it waits for does not come.
  void abort() noexcept override {
    if (origin_.foreign()) return;
    sender_.abort();
    receiver_.abort();
    peer_->hang_up();
  }

  void shutdown() override {
    // A forked child has this object and no part in the pair.
    if (origin_.foreign() || down_.exchange(true)) return;
    abort();
    place_->leave();
    receiver_.finish();
    sender_.finish();
  }

 private:
  const Origin origin_;
  std::atomic<bool> down_{false};
  std::atomic<bool> alarmed_{false};
  // These outlive the two halves, which use them.
  const std::unique_ptr<ShmProgress::Place> place_;
  const std::unique_ptr<ShmPipe> out_;
  const std::unique_ptr<ShmPipe> in_;
  const std::unique_ptr<ShmPeer> peer_;
  ShmPairSender sender_;
  ShmPairReceiver receiver_;
};

}  // namespace

ShmPairRendezvous::ShmPairRendezvous(std::shared_ptr<ShmProgress> progress)
    : place_(std::make_unique<ShmProgress::Place>(std::move(progress))), pipe_(ShmPipe::create()) {}

std::shared_ptr<ProbingTransport> ShmPairRendezvous::meet(int32_t rank, int32_t peer,
                                                          const std::string& address, TimePoint deadline,
                                                          const std::function<void()>& checkpoint) {
  const auto greet = [&](int32_t) {
    const uint32_t number = place_->number();
    LocalMeeting::Greeting greeting{std::vector<std::byte>(sizeof number), place_->progress().bell().fds()};
    greeting.descriptors.push_back(pipe_->fd());
    std::memcpy(greeting.bytes.data(), &number, sizeof number);
    return greeting;
  };
  auto peers = meeting_.meet({{rank, meeting_.address()}, {peer, address}}, rank, kPairProtocol, greet,
                             deadline, checkpoint);
  LocalMeeting::Peer& met = peers.front();
  uint32_t number = 0;
  std::memcpy(&number, met.bytes.data(), sizeof number);
  std::vector<int> bell;
  for (size_t i = 0; i < ShmBell::kFds; ++i) bell.push_back(met.descriptors[i].get());
  auto in = ShmPipe::open(met.descriptors[ShmBell::kFds].get());
  pipe_->close_fd();
  auto there = std::make_unique<ShmPeer>(peer > rank ? 1 : 0, met.socket.release(),
                                         place_->progress().bell_of_peer(bell), number);
  return std::make_shared<ShmPair>(std::move(place_), std::move(pipe_), std::move(in), std::move(there));
}

}  // namespace meshcast
