#include "group/host_memory.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "group/agreement.h"
#include "transport/shm_transport.h"

namespace meshcast {
namespace {

constexpr auto kMeetLimit = std::chrono::seconds(30);  // every member is in this call already
constexpr const char* kOutcome = "shm";                // topic of the ranks' outcomes
constexpr std::string_view kLeft = "lost ";            // and that rank: of a rank that leaves because of it
constexpr std::string_view kAt = "at ";                // and the address; other offers are refusals
constexpr std::string_view kOff = "off ";              // and why

bool begins_with(const std::string& text, std::string_view prefix) { return text.rfind(prefix, 0) == 0; }

Error lost_error(const std::string& text, int32_t rank, int32_t lost) {
  return {ErrorKind::PeerLost,
          text + ". Look at that rank's own output first.",
          {.rank = rank, .peer = lost, .op = "connect", .phase = "connect"}};
}

void throw_if_lost(const HostMemory::FindLost& find, int32_t rank) {
  if (const auto lost = find())
    throw lost_error(fmt::format("rank {} lost rank {} while the ranks of their host connected their shared "
                                 "memory: {}",
                                 rank, lost->rank, lost->why),
                     rank, lost->rank);
}

}  // namespace

HostMemory::HostMemory(uint32_t ranks, const std::string& off) {
  if (!off.empty()) {
    offer_ = std::string(kOff) + off;
    return;
  }
  try {
    rendezvous_ = std::make_unique<ShmRendezvous>(ranks);
    offer_ = std::string(kAt) + rendezvous_->address();
  } catch (const std::exception& error) {
    offer_ = fmt::format("no {}", error.what());
  }
}

void HostMemory::meet(Conversation& conversation, const std::vector<int32_t>& group,
                      const std::map<int32_t, std::string>& offers, TimePoint deadline, const FindLost& lost) {
  group_ = group;
  const auto index = [&](int32_t rank) {
    return static_cast<int>(std::lower_bound(group.begin(), group.end(), rank) - group.begin());
  };
  std::vector<ShmMember> members;
  std::string refusal;
  bool all_off = true;
  for (const auto& [rank, text] : offers) {
    ranks_.push_back(rank);
    all_off = all_off && begins_with(text, kOff);
    if (begins_with(text, kAt)) {
      members.push_back({index(rank), text.substr(kAt.size())});
    } else if (refusal.empty()) {
      refusal = fmt::format("rank {}: {}", rank, text.substr(text.find(' ') + 1));
    }
  }
  if (offers.size() == 1 || !refusal.empty()) {
    drop(all_off ? std::string() : refusal);
    return;
  }
  const int32_t rank = conversation.rank();
  bool seen = false;  // `lost` found a rank, or raised something
  const auto look = [&] {
    seen = true;
    throw_if_lost(lost, rank);
    seen = false;
  };
  try {
    const TimePoint limit = std::min<TimePoint>(deadline, Clock::now() + kMeetLimit);
    transport_ = make_shm_transport(rendezvous_->meet(members, index(rank), limit, look));
  } catch (const std::exception& failure) {
    const auto* error = dynamic_cast<const Error*>(&failure);
    const bool is_lost = error && error->kind() == ErrorKind::PeerLost;
    if (seen && !is_lost) throw;
    rendezvous_.reset();  // closes its socket, so that no rank continues to wait for this one
    if (!is_lost) {
      outcome_ = fmt::format("rank {}: {}", rank, failure.what());
      return;
    }
    ErrorContext context = error->context();
    if (!seen) context.peer = group[static_cast<size_t>(context.peer)];
    check_ranks(conversation, {context.peer});
    throw Error(ErrorKind::PeerLost, failure.what(), context);
  }
}

void HostMemory::settle(Conversation& conversation, TimePoint deadline, const FindLost& lost) {
  if (ranks_.empty()) return;
  const int32_t rank = conversation.rank();
  conversation.say(kOutcome, outcome_);
  const auto look = [&] {
    std::vector<int32_t> gone;
    for (const int peer : transport_ ? transport_->check_peers() : std::vector<int>())
      gone.push_back(group_[static_cast<size_t>(peer)]);
    check_ranks(conversation, gone);
    throw_if_lost(lost, rank);
  };
  const auto late = fmt::format(
      "rank {}: connecting the private group of ranks {} did not finish in time: ranks {{missing}} posted "
      "nothing "
      "within {{elapsed}} s",
      rank, format_ranks(group_));
  for (const auto& [other, outcome] :
       conversation.hear(kOutcome, ranks_, deadline, {late, "connect", "connect"}, look)) {
    if (begins_with(outcome, kLeft)) check_ranks(conversation, {other});
    if (!outcome.empty()) return drop(outcome);
  }
}

LocalRanks HostMemory::take() {
  rendezvous_.reset();
  return transport_ ? LocalRanks{std::move(transport_), std::move(ranks_)} : LocalRanks{};
}

void HostMemory::check_ranks(Conversation& conversation, const std::vector<int32_t>& gone) {
  for (int32_t rank : gone) {
    if (const auto said = conversation.heard(kOutcome, rank)) {
      if (!begins_with(*said, kLeft)) continue;
      rank = std::stoi(said->substr(kLeft.size()));
    }
    conversation.say(kOutcome, fmt::format("{}{}", kLeft, rank));
    throw lost_error(fmt::format("rank {}: rank {} exited while the ranks {} of this host connected",
                                 conversation.rank(), rank, format_ranks(ranks_)),
                     conversation.rank(), rank);
  }
}

void HostMemory::drop(const std::string& obstacle) {
  rendezvous_.reset();
  transport_.reset();
  ranks_.clear();
  obstacle_ = obstacle;
}

}  // namespace meshcast
