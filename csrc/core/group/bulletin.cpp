#include "group/bulletin.h"

#include <charconv>
#include <system_error>

#include <fmt/format.h>

namespace meshcast {
namespace {

constexpr size_t kMaxText = 16 * 1024;  // descriptors are a few hundred bytes
constexpr const char* kCauseKey = "cause";

std::string key_of(const char* topic, int32_t lane, int64_t ordinal) {
  return fmt::format("{}/{}/{}", topic, lane, ordinal);
}

std::string posting_key(int32_t lane, int64_t ordinal, int32_t rank) {
  return fmt::format("call/{}/{}/{}", lane, ordinal, rank);
}

// A number at the head of a line from the store; -1 if it is not a number.
int32_t parse_number(const std::string& text, size_t begin, size_t end) {
  int32_t value = -1;
  if (end > text.size() || begin > end) return -1;
  std::from_chars(text.data() + begin, text.data() + end, value);
  return value;
}

std::string encode(const Posting& posting) {
  const char kind = posting.rejected ? 'R' : posting.moves ? 'M' : 'D';
  return fmt::format("{} {} {}\n{}", kind, posting.slot, posting.rank, posting.text.substr(0, kMaxText));
}

Posting decode_posting(const std::string& text) {
  const size_t line = text.find('\n');
  const size_t blank = text.find(' ', 2);
  if (line == std::string::npos || blank == std::string::npos || blank > line)
    return {true, -1, "unreadable posting"};
  return {text[0] == 'R', parse_number(text, 2, blank), text.substr(line + 1),
          parse_number(text, blank + 1, line), text[0] == 'M'};
}

// "7 text": a number at the head of a text.
std::optional<std::pair<int64_t, std::string>> split(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  int64_t number = -1;
  const char* const end = text->data() + text->size();
  const auto [at, bad] = std::from_chars(text->data(), end, number);
  if (bad != std::errc() || number < 0) return std::nullopt;
  return std::pair(number, std::string(at == end ? at : at + 1, end));
}

}  // namespace

std::string encode(const Cause& cause) {
  return fmt::format("{} {} {}\n{}", cause.kind, cause.reporter, cause.peer, cause.text.substr(0, kMaxText));
}

Cause decode_cause(const std::string& text) {
  const size_t line = text.find('\n');
  const size_t a = text.find(' ');
  const size_t b = a == std::string::npos ? a : text.find(' ', a + 1);
  if (line == std::string::npos || b == std::string::npos || b > line) return {0, -1, -1, text};
  return {parse_number(text, 0, a), parse_number(text, a + 1, b), parse_number(text, b + 1, line),
          text.substr(line + 1)};
}

void Bulletin::post(int32_t lane, int64_t ordinal, const Posting& posting) {
  store_->set(posting_key(lane, ordinal, posting.rank), encode(posting));
}

std::optional<Posting> Bulletin::read(int32_t lane, int64_t ordinal, int32_t rank) {
  const auto found = store_->value(posting_key(lane, ordinal, rank));
  return found ? std::optional(decode_posting(*found)) : std::nullopt;
}

void Bulletin::erase(int32_t lane, int64_t ordinal, int32_t rank) {
  store_->erase(posting_key(lane, ordinal, rank));
}

Roll Bulletin::agreeing(int32_t lane, int64_t ordinal, const std::string& digest, size_t ranks) {
  return {store_, key_of("count", lane, ordinal) + "/" + digest, ranks};
}

Roll Bulletin::standing(int32_t lane, int64_t ordinal, size_t ranks) {
  return {store_, key_of("stall", lane, ordinal), ranks};
}

Posting Bulletin::first(int32_t lane, int64_t ordinal, const Posting& mine) {
  return decode_posting(store_->compare_set(key_of("first", lane, ordinal), std::string(), encode(mine)));
}

void Bulletin::object(int32_t lane, int64_t ordinal, const Posting& mine) {
  store_->compare_set(key_of("objection", lane, ordinal), std::string(), encode(mine));
}

std::optional<Posting> Bulletin::objection(int32_t lane, int64_t ordinal) {
  const auto found = store_->value(key_of("objection", lane, ordinal));
  return found ? std::optional(decode_posting(*found)) : std::nullopt;
}

void Bulletin::erase_said(int32_t lane, int64_t ordinal) {
  store_->erase_own(key_of("first", lane, ordinal));
  store_->erase_own(key_of("objection", lane, ordinal));
}

// Keeps the text whose number comes before those of all others that are written there.
void Bulletin::keep_first(const std::string& key, int64_t number, const std::string& rest,
                          bool (*before)(int64_t, int64_t)) {
  const std::string mine = fmt::format("{} {}", number, rest);
  std::string seen;
  for (std::string found = store_->value(key).value_or(seen);;) {
    const auto kept = split(found);
    if (kept && !before(number, kept->first)) return;
    seen = std::exchange(found, store_->compare_set(key, found, mine));
    if (found == mine || found == seen) return;
  }
}

void Bulletin::pass(int32_t lane, int64_t ordinal, int32_t rank) {
  keep_first(fmt::format("passed/{}", lane), ordinal, std::to_string(rank),
             [](int64_t one, int64_t other) { return one > other; });
}

std::optional<std::pair<int64_t, int32_t>> Bulletin::passed(int32_t lane) {
  const auto found = split(store_->value(fmt::format("passed/{}", lane)));
  if (!found) return std::nullopt;
  return std::pair(found->first, parse_number(found->second, 0, found->second.size()));
}

std::string Bulletin::decide(int32_t lane, int64_t ordinal, const std::string& word, bool keeps) {
  const std::string key = key_of("decision", lane, ordinal);
  std::string found = store_->compare_set(key, std::string(), word);
  if (!keeps) store_->disown(key);
  return found;
}

void Bulletin::erase_decision(int32_t lane, int64_t ordinal) {
  store_->erase(key_of("decision", lane, ordinal));
}

void Bulletin::leave_at(int32_t lane, int64_t ordinal, int32_t rank, const std::string& why) {
  keep_first(fmt::format("left/{}", lane), ordinal, fmt::format("{} {}", rank, why.substr(0, kMaxText)),
             [](int64_t one, int64_t other) { return one < other; });
}

std::optional<Bulletin::Left> Bulletin::left_at(int32_t lane) {
  const auto found = split(store_->value(fmt::format("left/{}", lane)));
  const auto rest = found ? split(found->second) : std::nullopt;
  if (!rest) return std::nullopt;
  return Left{found->first, static_cast<int32_t>(rest->first), rest->second};
}

void Bulletin::wait_in(int32_t lane, int64_t ordinal, int32_t rank) {
  store_->set(fmt::format("waits/{}/{}", lane, rank), std::to_string(ordinal));
}

int64_t Bulletin::waits_in(int32_t lane, int32_t rank) {
  const auto found = split(store_->value(fmt::format("waits/{}/{}", lane, rank)));
  return found ? found->first : -1;
}

Cause Bulletin::settle_cause(const Cause& cause) {
  return decode_cause(store_->compare_set(kCauseKey, std::string(), encode(cause)));
}

std::optional<Cause> Bulletin::read_cause() {
  const auto text = store_->value(kCauseKey);
  return text ? std::optional(decode_cause(*text)) : std::nullopt;
}

}  // namespace meshcast
