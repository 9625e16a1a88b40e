#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "group/store.h"

namespace meshcast {

// A store of this process, in which something may happen right after something was counted.
class MemoryStore final : public Store {
 public:
  std::function<void()> after_count;

  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    content_[key] = value;
  }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    const std::lock_guard lock(mutex_);
    const auto found = content_.find(key);
    if (found != content_.end() && found->second != expected) return found->second;
    if (found == content_.end() && !expected.empty()) return expected;
    return content_[key] = desired;
  }
  int64_t add(const std::string& key, int64_t count) override {
    int64_t sum = 0;
    {
      const std::lock_guard lock(mutex_);
      std::string& value = content_[key];
      sum = (value.empty() ? 0 : std::stoll(value)) + count;
      value = std::to_string(sum);
    }
    if (count != 0 && after_count) std::exchange(after_count, nullptr)();
    return sum;
  }
  void erase(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    content_.erase(key);
  }
  std::optional<std::vector<std::string>> read(const std::vector<std::string>& keys) override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> out;
    for (const auto& key : keys)
      if (content_.count(key)) out.push_back(content_[key]);
    return out.size() == keys.size() ? std::optional(out) : std::nullopt;
  }
  const void* connection() const override { return this; }

  size_t size() const {
    const std::lock_guard lock(mutex_);
    return content_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string> content_;
};

}  // namespace meshcast
