#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/sync.h"
#include "group/store.h"

namespace meshcast {

// The store of a group's generation, with requests from one thread at a time. It reports since when a request
// waits for its answer, and remembers which keys this rank is to erase: those that it has written, unless
// another rank erases them.
class BoardStore final : public Store {
 public:
  explicit BoardStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override;
  int64_t add(const std::string& key, int64_t count) override;
  void erase(const std::string& key) override;
  std::optional<std::vector<std::string>> read(const std::vector<std::string>& keys) override;
  const void* connection() const override { return store_->connection(); }

  TimePoint waits_since() const { return waits_since_; }  // TimePoint() if none does
  void erase_own(const std::string& key);                 // if it is in own_
  void erase_all();                                       // all keys in own_
  void disown(const std::string& key);                    // another rank erases it

 private:
  class Wait;
  void own(const std::string& key);
  bool owns(const std::string& key) const;

  const std::shared_ptr<Store> store_;
  std::atomic<TimePoint> waits_since_{TimePoint()};
  mutable Mutex mutex_;
  std::set<std::string> own_;
};

}  // namespace meshcast
