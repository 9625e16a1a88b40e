#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "group/agreed_plan.h"

namespace meshcast {

// What the ranks of a group have agreed on for calls that are made once, by descriptor. The least recently used
// agreement is dropped first, and frees its slot.
//
// Each rank begins its calls in the same order, and this changes only as a call begins, once it is certain to
// begin. So all ranks remember and forget the same descriptors at the same calls, even if they have queued,
// refused or dropped different ones.
class Agreements {
 public:
  explicit Agreements(size_t most) : most_(most) {}

  bool has(const std::string& descriptor) const { return found_.count(descriptor) != 0; }

  // Null if nothing was agreed on, or it is forgotten. Marks it as the most recently used.
  std::shared_ptr<AgreedPlan> use(const std::string& descriptor) {
    const auto found = found_.find(descriptor);
    if (found == found_.end()) return nullptr;
    order_.splice(order_.end(), order_, found->second);
    return found->second->second;
  }

  // Returns the agreement that is dropped for it, or null.
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
