#include "group/conversation.h"

#include <fmt/format.h>

namespace meshcast {
std::string Conversation::key_of(const std::string& topic, int32_t rank) const {
  return fmt::format("{}/{}", topic, rank);
}

void Conversation::say(const std::string& topic, const std::string& text) {
  store_->set(key_of(topic, rank_), text);
}

void Conversation::forget(const std::string& topic) { store_->erase(key_of(topic, rank_)); }

std::optional<std::string> Conversation::heard(const std::string& topic, int32_t rank) {
  return store_->value(key_of(topic, rank));
}

std::map<int32_t, std::string> Conversation::hear(const std::string& topic, const std::vector<int32_t>& ranks,
                                                  TimePoint deadline, const std::function<void()>& check,
                                                  Clock::duration every) {
  std::vector<std::string> keys;
  for (const int32_t rank : ranks) keys.push_back(key_of(topic, rank));
  std::map<int32_t, std::string> out;
  if (const auto texts = await_all(keys, deadline, check, every)) {
    for (size_t i = 0; i < ranks.size(); ++i) out[ranks[i]] = (*texts)[i];
    return out;
  }
  for (const int32_t rank : ranks)
    if (auto text = heard(topic, rank)) out[rank] = std::move(*text);
  return out;
}

Conversation::Texts Conversation::await_all(const std::vector<std::string>& keys, TimePoint deadline,
                                            const std::function<void()>& check, Clock::duration every) {
  BackOff pause = back_off();
  for (TimePoint checked = Clock::now();;) {
    if (auto texts = store_->read(keys)) return texts;
    const TimePoint now = Clock::now();
    if (check && (now - checked >= every || now >= deadline)) {
      check();
      checked = now;
    }
    if (now >= deadline) return std::nullopt;
    pause.sleep(deadline - now);
  }
}

std::string Conversation::verdict(const std::string& topic, const std::string& proposal) {
  if (!proposal.empty()) return store_->compare_set(topic, std::string(), proposal);
  return store_->value(topic).value_or(std::string());
}

}  // namespace meshcast
