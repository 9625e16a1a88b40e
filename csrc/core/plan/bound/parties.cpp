#include "plan/bound/parties.h"

#include <algorithm>

namespace meshcast {
namespace {

std::vector<Party> by_host(const std::vector<int32_t>& ranks, const Network& network) {
  std::vector<std::pair<int32_t, int32_t>> keys;
  keys.reserve(ranks.size());
  for (const int32_t rank : ranks) {
    const int32_t i = network.index(rank);
    keys.emplace_back(network.host(i), i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<Party> out;
  for (const auto& [host, i] : keys) {
    if (out.empty() || out.back().host != host) out.push_back({host, {}});
    out.back().ranks.push_back(i);
  }
  return out;
}

}  // namespace

Parties find_parties(const Task& task, const Network& network) {
  Parties out;
  out.holders = by_host(task.holders, network);
  out.receivers = by_host(task.receivers, network);
  size_t at = 0;
  for (const Party& party : out.receivers) {
    while (at < out.holders.size() && out.holders[at].host < party.host) ++at;
    const bool holds = at < out.holders.size() && out.holders[at].host == party.host;
    out.holder_party.push_back(holds ? static_cast<int32_t>(at) : -1);
    out.remote_hosts += !holds;
  }
  out.one_host = out.holders.size() == 1 && out.receivers.size() == 1 && out.remote_hosts == 0;
  return out;
}

}  // namespace meshcast
