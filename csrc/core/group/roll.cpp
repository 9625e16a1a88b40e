#include "group/roll.h"

#include <algorithm>

namespace meshcast {

// Each bit is added once, so the sum has the bits of the ranks that have signed; the last one is the sign bit.
void Roll::sign(size_t at) {
  seen_[at / kBits] = static_cast<uint64_t>(store_->add(word(at), static_cast<int64_t>(bit(at))));
}

void Roll::unsign(size_t at) {
  constexpr int64_t kHalf = int64_t{1} << (kBits - 2);
  const bool is_sign = at % kBits == kBits - 1;  // twice a half, since no number is the whole
  if (is_sign) store_->add(word(at), kHalf);
  const bool is_last = store_->add(word(at), is_sign ? kHalf : -static_cast<int64_t>(bit(at))) == 0;
  if (is_last)
    store_->erase(word(at));
  else
    store_->disown(word(at));
}

bool Roll::is_full(size_t at) const {
  const size_t first = at / kBits * kBits;
  for (size_t each = first; each < std::min(ranks_, first + kBits); ++each)
    if (!has(each)) return false;
  return true;
}

bool Roll::answer(size_t at) {
  sign(at);
  if (!is_full(at)) return false;
  return seen_.size() == 1 || store_->add(full(), 1) == static_cast<int64_t>(seen_.size());
}

bool Roll::all_answered() {
  if (seen_.size() > 1) return store_->add(full(), 0) == static_cast<int64_t>(seen_.size());
  refresh();
  return is_full(0);
}

std::vector<size_t> Roll::missing() const {
  std::vector<size_t> out;
  for (size_t at = 0; at < ranks_; ++at)
    if (!has(at)) out.push_back(at);
  return out;
}

void Roll::refresh() {
  for (size_t each = 0; each < seen_.size(); ++each)
    seen_[each] = static_cast<uint64_t>(store_->add(word(each * kBits), 0));
}

std::vector<std::string> Roll::keys() const {
  std::vector<std::string> out;
  for (size_t each = 0; each < seen_.size(); ++each) out.push_back(word(each * kBits));
  if (seen_.size() > 1) out.push_back(full());
  return out;
}

void Roll::erase() {
  for (const std::string& key : keys()) store_->erase(key);
}

void Roll::disown() {
  for (const std::string& key : keys()) store_->disown(key);
}

}  // namespace meshcast
