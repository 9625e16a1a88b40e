#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace meshcast {

// The rendezvous store of a group as its protocols see it, over a connection without blocking waits, which
// would lock out all its other users. Every call is short if the store answers, and may throw what the store
// throws. If it does not answer, a call may never return: torch has no limit for that.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Sets a key if its value is `expected`; a missing key counts as the empty value. Returns the value it has
  // then, or `expected` if the key is still missing.
  virtual std::string compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) = 0;
  // The value of a key, none if it is not set. In one request, since a rank may erase the key between two, and
  // get() waits for a missing key. `none` is the value of no key, so this sets nothing.
  std::optional<std::string> value(const std::string& key) {
    const std::string none("\x01none");
    std::string found = compare_set(key, none, none);
    if (found == none) return std::nullopt;
    return found;
  }
  virtual int64_t add(const std::string& key, int64_t count) = 0;  // returns the sum
  virtual void erase(const std::string& key) = 0;
  // The values of all these keys, in their order; none unless each is set. No rank may erase one meanwhile.
  virtual std::optional<std::vector<std::string>> read(const std::vector<std::string>& keys) = 0;
  // Identifies the connection that stores may share, whose calls lock each other out.
  virtual const void* connection() const = 0;
};

// The keys of a store below a prefix, over the same connection.
class PrefixedStore final : public Store {
 public:
  PrefixedStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix) + "/"), store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(prefix_ + key, value); }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    return store_->compare_set(prefix_ + key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t count) override { return store_->add(prefix_ + key, count); }
  void erase(const std::string& key) override { store_->erase(prefix_ + key); }
  std::optional<std::vector<std::string>> read(const std::vector<std::string>& keys) override {
    std::vector<std::string> whole;
    whole.reserve(keys.size());
    for (const std::string& key : keys) whole.push_back(prefix_ + key);
    return store_->read(whole);
  }
  const void* connection() const override { return store_->connection(); }

 private:
  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace meshcast
