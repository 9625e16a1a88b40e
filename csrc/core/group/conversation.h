#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/sync.h"
#include "group/store.h"

namespace meshcast {

// The pauses between repeated requests.
class BackOff {
 public:
  explicit BackOff(Clock::duration longest) : longest_(longest) {}
  // left: the time to a limit, which ends a pause; ignored once the limit has passed.
  void sleep(Clock::duration left) {
    const bool counts = left > Clock::duration::zero();
    sleep_for(counts ? std::min(pause_, std::max<Clock::duration>(left, kFirst)) : pause_);
    pause_ = std::min<Clock::duration>(pause_ * 2, longest_);
  }

  static constexpr auto kFirst = std::chrono::microseconds(500);

 private:
  const Clock::duration longest_;
  Clock::duration pause_ = kFirst;
};

// Texts that ranks exchange through the store, next to the data path: by topic, and by the rank that said them.
// Nothing here waits in the store: a waiting rank polls, less and less often, since a wait in a store locks out
// all other users of its connection. Throws what the store throws. Thread-safe.
class Conversation {
 public:
  static constexpr auto kFirstPause = BackOff::kFirst;  // between two requests
  static constexpr auto kLongestPause = std::chrono::milliseconds(20);

  // ranks: how many may ask the store at once. Many ask less often, since it answers one request at a time.
  Conversation(std::shared_ptr<Store> store, int32_t rank, size_t ranks)
      : store_(std::move(store)),
        rank_(rank),
        crowd_(static_cast<int64_t>(std::max<size_t>(1, ranks / kNoCrowd))) {}

  // The error of a wait that came to its deadline. In its text, "{missing}" is replaced by the ranks that have
  // said nothing, "{first}" by the first of them, and "{elapsed}" by the seconds of the wait.
  struct Late {
    std::string text;
    std::string op;
    std::string phase;
  };

  int32_t rank() const { return rank_; }
  int64_t crowd() const { return crowd_; }  // the factor by which each of so many ranks asks less often
  BackOff back_off() const { return BackOff(kLongestPause * crowd_); }

  void say(const std::string& topic, const std::string& text);  // for this rank; replaces its earlier text
  // Erases what this rank said. Only once no rank reads it any longer.
  void forget(const std::string& topic);

  // What a rank has said; none if nothing.
  std::optional<std::string> heard(const std::string& topic, int32_t rank);
  // The ranks among `ranks` that have said nothing.
  std::vector<int32_t> silent(const std::string& topic, const std::vector<int32_t>& ranks);
  // Waits until all `ranks` have said something; returns what was said, by rank. Throws DeadlineExceeded, with
  // the text of `late`, if they have not by `deadline`. check: called between two requests, at most once in
  // `every`, and at the deadline; throws to end the wait.
  std::map<int32_t, std::string> hear(const std::string& topic, const std::vector<int32_t>& ranks,
                                      TimePoint deadline, const Late& late = {},
                                      const std::function<void()>& check = {}, Clock::duration every = {});
  // Counts the ranks that called this with 1; returns how many have.
  int64_t count(const std::string& topic, int64_t more) { return store_->add(topic, more); }
  // The first proposal for a topic wins, and is returned. An empty one proposes nothing; "": no verdict yet.
  std::string verdict(const std::string& topic, const std::string& proposal);
  // Waits for a verdict; "" if there is none by `deadline`. check, every: as for hear().
  std::string await_verdict(const std::string& topic, TimePoint deadline,
                            const std::function<void()>& check = {}, Clock::duration every = {});
  // Erases a count or a verdict. Only once no rank asks for it any longer.
  void erase(const std::string& topic) { store_->erase(topic); }

 private:
  using Texts = std::optional<std::vector<std::string>>;

  static constexpr size_t kNoCrowd = 16;  // up to so many do not crowd a store

  std::string key_of(const std::string& topic, int32_t rank) const;
  // look: called between any two requests.
  Texts await_all(const std::vector<std::string>& keys, TimePoint deadline, const std::function<void()>& check,
                  Clock::duration every, const std::function<void(TimePoint now)>& look = {});

  const std::shared_ptr<Store> store_;
  const int32_t rank_;
  const int64_t crowd_;
};

}  // namespace meshcast
