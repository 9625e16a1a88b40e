#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "support/round_check.h"

namespace meshcast {
namespace {

class Replay {
 public:
  explicit Replay(const std::vector<RankRounds>& ranks) : ranks_(ranks) {
    for (const RankRounds& rounds : ranks) {
      State& state = states_.emplace_back();
      for (const RoundStep& step : rounds.steps)
        if (step.kind == StepKind::Exchange) state.exchanges.push_back(&step);
    }
  }

  std::string run() {
    for (size_t rank = 0; rank < states_.size(); ++rank) begin_next(static_cast<int32_t>(rank));
    while (mistake_.empty() && !entered_.empty()) {
      const int32_t rank = entered_.front();
      entered_.pop_front();
      match(rank);
    }
    if (!mistake_.empty()) return mistake_;
    for (size_t rank = 0; rank < states_.size(); ++rank)
      if (states_[rank].current < states_[rank].exchanges.size()) return standstill(static_cast<int32_t>(rank));
    return {};
  }

 private:
  struct State {
    std::vector<const RoundStep*> exchanges;
    size_t current = 0;  // the exchange the rank is in
    int32_t left = 0;    // messages of it that are not complete
  };
  struct Posted {
    int32_t round = -1;
    const RoundMessage* message = nullptr;
  };
  using Pair = std::pair<int32_t, int32_t>;  // from, to

  static Pair pair_of(int32_t rank, const RoundMessage& message) {
    return message.send ? Pair{rank, message.peer} : Pair{message.peer, rank};
  }

  void begin_next(int32_t rank) {
    State& state = states_[static_cast<size_t>(rank)];
    if (state.current == state.exchanges.size()) return;
    const RoundStep& step = *state.exchanges[state.current];
    state.left = step.end - step.begin;
    for (int32_t i = step.begin; i < step.end; ++i) {
      const RoundMessage& message = ranks_[static_cast<size_t>(rank)].messages[static_cast<size_t>(i)];
      if (message.peer < 0 || message.peer >= static_cast<int32_t>(ranks_.size()) || message.peer == rank) {
        mistake_ = fmt::format("rank {}, round {}: names peer {} of {} ranks", rank, step.round, message.peer,
                               ranks_.size());
        return;
      }
      (message.send ? sends_ : recvs_)[pair_of(rank, message)].push_back({step.round, &message});
    }
    entered_.push_back(rank);
  }

  // Ends what has both its ends now that `rank` has entered an exchange, which may be over already.
  void match(int32_t rank) {
    const State& state = states_[static_cast<size_t>(rank)];
    if (state.current == state.exchanges.size()) return;
    const RoundStep& step = *state.exchanges[state.current];
    for (int32_t i = step.begin; i < step.end && mistake_.empty(); ++i) {
      const RoundMessage& message = ranks_[static_cast<size_t>(rank)].messages[static_cast<size_t>(i)];
      const Pair pair = pair_of(rank, message);
      auto& sends = sends_[pair];
      auto& recvs = recvs_[pair];
      while (!sends.empty() && !recvs.empty() && mistake_.empty()) {
        const Posted send = sends.front();
        const Posted recv = recvs.front();
        sends.pop_front();
        recvs.pop_front();
        if (send.message->nbytes != recv.message->nbytes || send.message->hop != recv.message->hop) {
          mistake_ = fmt::format(
              "rank {}, round {}: sends hop {} of {} bytes to rank {}, which receives hop {} of {} bytes in "
              "its "
              "round {}",
              pair.first, send.round, send.message->hop, send.message->nbytes, pair.second, recv.message->hop,
              recv.message->nbytes, recv.round);
          return;
        }
        through(pair.first);
        through(pair.second);
      }
    }
  }

  void through(int32_t rank) {
    State& state = states_[static_cast<size_t>(rank)];
    if (--state.left > 0) return;
    ++state.current;
    begin_next(rank);
  }

  // A message of the rank's current exchange that is not complete, as (text, peer).
  std::pair<std::string, int32_t> waits_for(int32_t rank) const {
    const State& state = states_[static_cast<size_t>(rank)];
    const RoundStep& step = *state.exchanges[state.current];
    for (int32_t i = step.begin; i < step.end; ++i) {
      const RoundMessage& message = ranks_[static_cast<size_t>(rank)].messages[static_cast<size_t>(i)];
      const auto& queues = message.send ? sends_ : recvs_;
      const auto& queue = queues.at(pair_of(rank, message));
      if (std::any_of(queue.begin(), queue.end(), [&](const Posted& p) { return p.message == &message; }))
        return {fmt::format("rank {}, round {}: {} hop {} {} rank {}", rank, step.round,
                            message.send ? "sends" : "receives", message.hop, message.send ? "to" : "from",
                            message.peer),
                message.peer};
    }
    return {};
  }

  std::string standstill(int32_t rank) const {
    std::vector<int32_t> path;
    std::string text;
    for (;;) {
      const auto seen = std::find(path.begin(), path.end(), rank);
      if (seen != path.end()) {
        text = "cycle: ";
        for (auto it = seen; it != path.end(); ++it) text += waits_for(*it).first + "; ";
        return text + fmt::format("back to rank {}", rank);
      }
      path.push_back(rank);
      const auto [what, peer] = waits_for(rank);
      const State& other = states_[static_cast<size_t>(peer)];
      if (other.current == other.exchanges.size()) return what + ", which has no exchange left";
      rank = peer;
    }
  }

  const std::vector<RankRounds>& ranks_;
  std::vector<State> states_;
  std::map<Pair, std::deque<Posted>> sends_, recvs_;  // under way, neither end of which is through
  std::deque<int32_t> entered_;
  std::string mistake_;
};

}  // namespace

std::string check_exchanges(const std::vector<RankRounds>& ranks) { return Replay(ranks).run(); }

}  // namespace meshcast
