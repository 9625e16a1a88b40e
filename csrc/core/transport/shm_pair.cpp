#include "transport/shm_pair.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include "common/error.h"
#include "common/forks.h"
#include "transport/shm_pair_receiver.h"
#include "transport/shm_pair_sender.h"

namespace meshcast {
namespace {

// Each of the two sends its number on its own doorbell, with its pipe and its process's doorbell.
constexpr LocalMeeting::Protocol kPairProtocol{0x6d637031, sizeof(uint32_t), 1 + Doorbell::kFds,
                                               "shared memory"};
// Then, once each has mapped what it received, whether that worked.
const std::string kHasIt = "+";
const std::string kHasItNot = "-";  // and why
constexpr size_t kMostTold = 256;   // characters
constexpr int kSettleSliceMs = 5;   // between two checks whether to continue waiting

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
    alarmed_ = true;  // the peer may have ended before
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
    // If both directions are in use, a driver leaves the sending to the process's thread.
    return sender_.turn([&] {
      if (who != Who::Driver || !receiver_.waits()) return false;
      place_->progress().help();
      return true;
    });
  }
  void alarmed() override { alarmed_ = true; }

  // The peer sees it at once, since its messages will not come.
  void abort() noexcept override {
    if (origin_.foreign()) return;
    sender_.abort();
    receiver_.abort();
    peer_->hang_up();
  }

  void shutdown() override {
    // A forked child has this object but takes no part in the pair.
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

// Both ends use the memory or neither does: each reports to the other whether it has mapped it; `obstacle` is
// the reason if not. An end that reports nothing closes its socket. Throws if one of the two has not mapped it.
void settle(const Descriptor& socket, const std::string& obstacle, TimePoint deadline,
            const std::function<void()>& checkpoint) {
  const std::string own = (obstacle.empty() ? kHasIt : kHasItNot) + obstacle.substr(0, kMostTold);
  const bool told = send(socket.get(), own.data(), own.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
  if (!obstacle.empty()) throw Error(ErrorKind::Generic, obstacle);
  std::string others(1 + kMostTold, 0);
  for (;;) {
    const ssize_t got = recv(socket.get(), others.data(), others.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      if (Clock::now() >= deadline)
        throw Error(ErrorKind::DeadlineExceeded, "the other rank did not say whether it has connected");
      checkpoint();
      pollfd entry{socket.get(), POLLIN, 0};
      poll(&entry, 1, kSettleSliceMs);
      continue;
    }
    others.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (others == kHasIt && told) return;
    throw Error(ErrorKind::Generic, others.size() > 1 ? "the other rank: " + others.substr(1)
                                                      : "the other rank exited, or gave up");
  }
}

}  // namespace

ShmPairRendezvous::ShmPairRendezvous(std::shared_ptr<ShmProgress> progress)
    : place_(std::make_unique<ShmProgress::Place>(std::move(progress))), pipe_(ShmPipe::create()) {}

std::shared_ptr<ProbingTransport> ShmPairRendezvous::meet(int32_t rank, int32_t peer,
                                                          const std::string& address, TimePoint deadline,
                                                          const std::function<void()>& checkpoint) {
  const auto greet = [&](int32_t) {
    const uint32_t number = place_->number();
    LocalMeeting::Greeting greeting{std::vector<std::byte>(sizeof number), place_->progress().doorbell().fds()};
    greeting.descriptors.push_back(pipe_->fd());
    std::memcpy(greeting.bytes.data(), &number, sizeof number);
    return greeting;
  };
  auto peers = meeting_.meet({{rank, meeting_.address()}, {peer, address}}, rank, kPairProtocol, greet,
                             deadline, checkpoint);
  LocalMeeting::Peer& met = peers.front();
  std::shared_ptr<Doorbell> doorbell;
  std::unique_ptr<ShmPipe> in;
  std::string obstacle;
  try {
    std::vector<int> fds;
    for (size_t i = 0; i < Doorbell::kFds; ++i) fds.push_back(met.descriptors[i].get());
    doorbell = place_->progress().doorbell_of_peer(fds);
    in = ShmPipe::open(met.descriptors[Doorbell::kFds].get());
  } catch (const std::exception& error) {
    obstacle = error.what();
  }
  settle(met.socket, obstacle, deadline, checkpoint);
  pipe_->close_fd();
  uint32_t number = 0;
  std::memcpy(&number, met.bytes.data(), sizeof number);
  auto there =
      std::make_unique<ShmPeer>(peer > rank ? 1 : 0, met.socket.release(), std::move(doorbell), number);
  return std::make_shared<ShmPair>(std::move(place_), std::move(pipe_), std::move(in), std::move(there));
}

}  // namespace meshcast
