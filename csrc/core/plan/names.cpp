#include <array>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "plan/plan.h"

namespace meshcast {
namespace {

constexpr std::pair<Strategy, const char*> kStrategies[] = {
#define MESHCAST_STRATEGY(name, text, ...) {Strategy::name, text},
#define MESHCAST_SEARCH(name, text, ...) {Strategy::name, text},
#include "plan/strategies.def"
};
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

template <typename Table, typename Value>
const char* text_of(const Table& table, Value wanted) {
  for (const auto& [value, text] : table) {
    if (value == wanted) return text;
  }
  return "unknown";
}

template <typename Table>
std::vector<std::string> names_of(const Table& table) {
  std::vector<std::string> out;
  for (const auto& [value, text] : table) out.emplace_back(text);
  return out;
}

}  // namespace

const char* to_string(Strategy strategy) { return text_of(kStrategies, strategy); }
const char* to_string(Balance balance) { return text_of(kBalances, balance); }

std::vector<std::string> strategy_names() { return names_of(kStrategies); }
std::vector<std::string> balance_names() { return names_of(kBalances); }

Strategy parse_strategy(const std::string& name) { return parse(kStrategies, name, "strategy"); }
Balance parse_balance(const std::string& name) { return parse(kBalances, name, "balance"); }
ReduceOp parse_reduce_op(const std::string& name) { return parse(kReduceOps, name, "reduce operation"); }

}  // namespace meshcast
