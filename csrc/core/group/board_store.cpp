#include "group/board_store.h"

namespace meshcast {

class BoardStore::Wait {
 public:
  explicit Wait(BoardStore& store) : since_(store.waits_since_) { since_ = Clock::now(); }
  ~Wait() { since_ = TimePoint(); }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

 private:
  std::atomic<TimePoint>& since_;
};

void BoardStore::set(const std::string& key, const std::string& value) {
  const Wait wait(*this);
  own(key);
  store_->set(key, value);
}

std::string BoardStore::compare_set(const std::string& key, const std::string& expected,
                                    const std::string& desired) {
  const Wait wait(*this);
  std::string found = store_->compare_set(key, expected, desired);
  if (desired != expected && found == desired) own(key);
  return found;
}

int64_t BoardStore::add(const std::string& key, int64_t count) {
  const Wait wait(*this);
  own(key);
  return store_->add(key, count);
}

void BoardStore::erase(const std::string& key) {
  const Wait wait(*this);
  disown(key);
  store_->erase(key);
}

void BoardStore::own(const std::string& key) {
  const std::lock_guard lock(mutex_);
  own_.insert(key);
}

bool BoardStore::owns(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  return own_.count(key) != 0;
}

void BoardStore::disown(const std::string& key) {
  const std::lock_guard lock(mutex_);
  own_.erase(key);
}

void BoardStore::erase_own(const std::string& key) {
  if (owns(key)) erase(key);
}

void BoardStore::erase_all() {
  std::set<std::string> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(own_);
  }
  for (const std::string& key : all) erase(key);
}

std::optional<std::vector<std::string>> BoardStore::read(const std::vector<std::string>& keys) {
  const Wait wait(*this);
  return store_->read(keys);
}

}  // namespace meshcast
