#include <array>
#include <string>
#include <utility>

#include "common/error.h"
#include "plan/plan.h"

namespace meshcast {
namespace {

constexpr std::array<std::pair<Strategy, const char*>, 6> kStrategies{
    {{Strategy::Auto, "auto"},
     {Strategy::Multicast, "multicast"},
     {Strategy::Broadcast, "broadcast"},
     {Strategy::SendRecv, "send_recv"},
     {Strategy::LocalAllGather, "local_all_gather"},
     {Strategy::GlobalAllGather, "global_all_gather"}}};
constexpr std::array<std::pair<Balance, const char*>, 4> kBalances{{{Balance::None, "none"},
                                                                    {Balance::Size, "size"},
                                                                    {Balance::Greedy, "greedy"},
                                                                    {Balance::Search, "search"}}};
constexpr std::array<std::pair<ReduceOp, const char*>, 5> kReduceOps{{{ReduceOp::Sum, "sum"},
                                                                      {ReduceOp::Avg, "avg"},
                                                                      {ReduceOp::Min, "min"},
                                                                      {ReduceOp::Max, "max"},
                                                                      {ReduceOp::Product, "product"}}};

template <typename Table>
auto parse(const Table& table, const std::string& name, const char* what) {
  std::string allowed;
  for (const auto& [value, text] : table) {
    if (name == text) return value;
    allowed += std::string(allowed.empty() ? "" : ", ") + text;
  }
  throw LayoutError(std::string("unknown ") + what + " '" + name + "': allowed are " + allowed);
}

}  // namespace

const char* to_string(Strategy strategy) {
  for (const auto& [value, text] : kStrategies) {
    if (value == strategy) return text;
  }
  return "unknown";
}

const char* to_string(Balance balance) {
  for (const auto& [value, text] : kBalances) {
    if (value == balance) return text;
  }
  return "unknown";
}

Strategy parse_strategy(const std::string& name) { return parse(kStrategies, name, "strategy"); }
Balance parse_balance(const std::string& name) { return parse(kBalances, name, "balance"); }
ReduceOp parse_reduce_op(const std::string& name) { return parse(kReduceOps, name, "reduce operation"); }

}  // namespace meshcast
