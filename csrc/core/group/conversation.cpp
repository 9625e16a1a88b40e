#include "group/conversation.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "common/error.h"
#include "common/signals.h"
#include "group/agreement.h"
#include "group/record.h"

namespace meshcast {
namespace {

using std::chrono::duration;

}  // namespace

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

std::vector<int32_t> Conversation::silent(const std::string& topic, const std::vector<int32_t>& ranks) {
  std::vector<int32_t> out;
  for (const int32_t rank : ranks)
    if (!heard(topic, rank)) out.push_back(rank);
  return out;
}

std::map<int32_t, std::string> Conversation::hear(const std::string& topic, const std::vector<int32_t>& ranks,
                                                  TimePoint deadline, const Late& late,
                                                  const std::function<void()>& check, Clock::duration every) {
  const TimePoint begun = Clock::now();
  std::vector<std::string> keys;
  for (const int32_t rank : ranks) keys.push_back(key_of(topic, rank));
  std::map<int32_t, std::string> out;
  WaitNotice notice(begun);
  const auto look_at_time = [&](TimePoint now) {
    if (late.op.empty() || !notice.is_due(now)) return;
    notice.post({.rank = rank_, .call = late.op, .state = late.phase, .ranks = silent(topic, ranks)});
  };
  if (const auto texts = await_all(keys, deadline, check, every, look_at_time)) {
    for (size_t i = 0; i < ranks.size(); ++i) out[ranks[i]] = (*texts)[i];
    return out;
  }
  std::vector<int32_t> missing;
  for (const int32_t rank : ranks) {
    if (auto text = heard(topic, rank)) {
      out[rank] = std::move(*text);
    } else {
      missing.push_back(rank);
    }
  }
  if (missing.empty()) return out;
  const double elapsed = duration<double>(Clock::now() - begun).count();
  std::string text = late.text;
  for (const auto& [name, value] :
       {std::pair("{missing}", format_ranks(missing)), std::pair("{first}", std::to_string(missing.front())),
        std::pair("{elapsed}", fmt::format("{:.1f}", elapsed))})
    if (const size_t at = text.find(name); at != std::string::npos) text.replace(at, std::strlen(name), value);
  throw Error(ErrorKind::DeadlineExceeded, text,
              {.rank = rank_,
               .peer = missing.front(),
               .op = late.op,
               .phase = late.phase,
               .elapsed = elapsed,
               .limit = duration<double>(deadline - begun).count()});
}

Conversation::Texts Conversation::await_all(const std::vector<std::string>& keys, TimePoint deadline,
                                            const std::function<void()>& check, Clock::duration every,
                                            const std::function<void(TimePoint now)>& look) {
  BackOff pause = back_off();
  for (TimePoint checked = Clock::now();;) {
    if (auto texts = store_->read(keys)) return texts;
    look_for_signals();
    const TimePoint now = Clock::now();
    if (look) look(now);
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

std::string Conversation::await_verdict(const std::string& topic, TimePoint deadline,
                                        const std::function<void()>& check, Clock::duration every) {
  const auto texts = await_all({topic}, deadline, check, every);
  return texts ? texts->front() : std::string();
}

}  // namespace meshcast
