#include "group/bulletin.h"

#include <charconv>

#include <fmt/format.h>

namespace meshcast {
namespace {

constexpr size_t kMaxText = 16 * 1024;  // descriptors are a few hundred bytes
constexpr const char* kCauseKey = "cause";

std::string posting_key(Bulletin::Board board, int32_t lane, int64_t ordinal, int32_t rank) {
  return fmt::format("{}/{}/{}/{}", board == Bulletin::Board::Agreement ? "call" : "stall", lane, ordinal,
                     rank);
}

// Numbers at the head of a line that came from the store; -1 where it is not one.
int32_t parse_number(const std::string& text, size_t begin, size_t end) {
  int32_t value = -1;
  if (end > text.size() || begin > end) return -1;
  std::from_chars(text.data() + begin, text.data() + end, value);
  return value;
}

std::string count_key(int32_t lane, int64_t ordinal, const std::string& digest) {
  return fmt::format("count/{}/{}/{}", lane, ordinal, digest);
}

Posting decode_posting(const std::string& text) {
  const size_t line = text.find('\n');
  if (line == std::string::npos || line < 3) return {true, -1, "unreadable posting"};
  return {text[0] == 'R', parse_number(text, 2, line), text.substr(line + 1)};
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

class Bulletin::Wait {
 public:
  explicit Wait(Bulletin& bulletin) : since_(bulletin.waits_since_) { since_ = Clock::now(); }
  ~Wait() { since_ = TimePoint(); }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

 private:
  std::atomic<TimePoint>& since_;
};

void Bulletin::post(Board board, int32_t lane, int64_t ordinal, int32_t rank, const Posting& posting) {
  const Wait wait(*this);
  store_->set(
      posting_key(board, lane, ordinal, rank),
      fmt::format("{} {}\n{}", posting.rejected ? 'R' : 'D', posting.slot, posting.text.substr(0, kMaxText)));
}

std::optional<Posting> Bulletin::read(Board board, int32_t lane, int64_t ordinal, int32_t rank) {
  const auto found = read_key(posting_key(board, lane, ordinal, rank));
  if (!found) return std::nullopt;
  return decode_posting(*found);
}

int64_t Bulletin::count(int32_t lane, int64_t ordinal, const std::string& digest) {
  const Wait wait(*this);
  return store_->add(count_key(lane, ordinal, digest), 1);
}

int64_t Bulletin::counted(int32_t lane, int64_t ordinal, const std::string& digest) {
  const Wait wait(*this);
  return store_->add(count_key(lane, ordinal, digest), 0);
}

void Bulletin::erase_count(int32_t lane, int64_t ordinal, const std::string& digest) {
  const Wait wait(*this);
  store_->erase(count_key(lane, ordinal, digest));
}

void Bulletin::erase(Board board, int32_t lane, int64_t ordinal, int32_t rank) {
  const Wait wait(*this);
  store_->erase(posting_key(board, lane, ordinal, rank));
}

void Bulletin::pass(int32_t lane, int64_t ordinal, int32_t rank) {
  const Wait wait(*this);
  store_->set(fmt::format("passed/{}/{}", lane, rank), std::to_string(ordinal));
}

int64_t Bulletin::passed(int32_t lane, int32_t rank) {
  return read_ordinal(fmt::format("passed/{}/{}", lane, rank));
}

std::string Bulletin::decide(int32_t lane, int64_t ordinal, const std::string& word) {
  const Wait wait(*this);
  return store_->compare_set(fmt::format("decision/{}/{}", lane, ordinal), std::string(), word);
}

void Bulletin::erase_decision(int32_t lane, int64_t ordinal) {
  const Wait wait(*this);
  store_->erase(fmt::format("decision/{}/{}", lane, ordinal));
}

void Bulletin::leave_at(int32_t lane, int64_t ordinal, int32_t rank, const std::string& why) {
  const Wait wait(*this);
  store_->set(fmt::format("left/{}/{}", lane, rank), fmt::format("{} {}", ordinal, why.substr(0, kMaxText)));
}

std::optional<std::pair<int64_t, std::string>> Bulletin::left_at(int32_t lane, int32_t rank) {
  const auto found = read_key(fmt::format("left/{}/{}", lane, rank));
  if (!found) return std::nullopt;
  const size_t blank = found->find(' ');
  int64_t ordinal = -1;
  std::from_chars(found->data(), found->data() + found->size(), ordinal);
  if (ordinal < 0 || blank == std::string::npos) return std::nullopt;
  return std::pair(ordinal, found->substr(blank + 1));
}

void Bulletin::wait_in(int32_t lane, int64_t ordinal, int32_t rank) {
  const Wait wait(*this);
  store_->set(fmt::format("waits/{}/{}", lane, rank), std::to_string(ordinal));
}

int64_t Bulletin::waits_in(int32_t lane, int32_t rank) {
  return read_ordinal(fmt::format("waits/{}/{}", lane, rank));
}

int64_t Bulletin::read_ordinal(const std::string& key) {
  const auto found = read_key(key);
  int64_t out = -1;
  if (found) std::from_chars(found->data(), found->data() + found->size(), out);
  return out;
}

Cause Bulletin::settle_cause(const Cause& cause) {
  const Wait wait(*this);
  return decode_cause(store_->compare_set(kCauseKey, std::string(), encode(cause)));
}

std::optional<Cause> Bulletin::read_cause() {
  const auto text = read_key(kCauseKey);
  if (!text) return std::nullopt;
  return decode_cause(*text);
}

std::optional<std::string> Bulletin::read_key(const std::string& key) {
  const Wait wait(*this);
  return store_->value(key);
}

}  // namespace meshcast
