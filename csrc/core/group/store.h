#pragma once

#include <cstdint>
#include <string>

namespace meshcast {

// The rendezvous store of a group as its protocols see it, over a connection that nobody waits on: a blocking
// wait locks all other users of a connection out. Every call is short where the store answers, and may throw
// what the store throws. Where it does not answer, a call may never return: torch has no limit for that.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Sets a key whose value is `expected`, no key counting as the empty value. Returns the value it has then; of
  // no key that is not set, `expected`.
  virtual std::string compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) = 0;
  virtual int64_t add(const std::string& key, int64_t count) = 0;  // returns the sum
  virtual void erase(const std::string& key) = 0;
  // What the calls of all stores over one connection share, and lock each other out of.
  virtual const void* connection() const = 0;
};

}  // namespace meshcast
