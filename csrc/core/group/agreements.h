#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "group/agreed_plan.h"

namespace meshcast {

// What the ranks of a group have agreed on for calls that are made once, by descriptor; the one that was used
// longest ago goes first, and gives its slot back.
//
// Each rank begins its calls in one order, and this is only touched as one of them begins, after it is known to
// begin. So all ranks remember and forget the same descriptors at the same calls, whatever else they have
// queued, refused or dropped.
class Agreements {
 public:
  explicit Agreements(size_t most) : most_(most) {}

  bool has(const std::string& descriptor) const { return found_.count(descriptor) != 0; }

  // Null where nothing was agreed on, or is forgotten. From now on the one that was used last.
  std::shared_ptr<AgreedPlan> use(const std::string& descriptor) {
    const auto found = found_.find(descriptor);
    if (found == found_.end()) return nullptr;
    order_.splice(order_.end(), order_, found->second);
    return found->second->second;
  }

  // Returns what it drives out, or null.
  std::shared_ptr<AgreedPlan> add(const std::string& descriptor, std::shared_ptr<AgreedPlan> agreed) {
    order_.emplace_back(descriptor, std::move(agreed));
    found_[descriptor] = std::prev(order_.end());
    if (order_.size() <= most_) return nullptr;
    auto oldest = std::move(order_.front());
    found_.erase(oldest.first);
    order_.pop_front();
    return oldest.second;
  }

 private:
  using Order = std::list<std::pair<std::string, std::shared_ptr<AgreedPlan>>>;

  size_t most_;
  Order order_;
  std::unordered_map<std::string, Order::iterator> found_;
};

}  // namespace meshcast
