#include "ipc/ipc_proof.h"

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <type_traits>

#include <fmt/format.h>

#include "common/error.h"
#include "common/keep_for_good.h"

namespace meshcast {
namespace {

constexpr auto kPause = std::chrono::microseconds(200);
constexpr int64_t kMarkBytes = sizeof(uint64_t);

struct Card {
  uint64_t version = 0x6d63'7031;
  uint64_t mark = 0;  // the value in the memory
  int64_t offset = 0;
  IpcHandle memory{};
  IpcHandle written{};
};
static_assert(std::is_trivially_copyable_v<Card>, "cards travel as they are");

uint64_t random_mark() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

IpcProof::IpcProof(IpcDriver& driver, RoundDevice& device)
    : driver_(driver),
      device_(device),
      memory_(driver.allocate_exportable(kMarkBytes)),
      mark_(std::make_shared<uint64_t>(random_mark())) {
  Card card;
  card.mark = *mark_;
  const auto range = driver_.exportable(memory_.get());
  const auto handle = range ? driver_.export_memory(*range) : std::nullopt;
  if (!handle) throw Error(ErrorKind::Generic, "CUDA does not export the memory that was made for it");
  card.offset = memory_.get() - range->base;
  card.memory = *handle;
  written_ = driver_.make_ipc_event(&card.written);
  driver_.copy(device_.transfer_stream(), memory_.get(), reinterpret_cast<const std::byte*>(mark_.get()),
               kMarkBytes);
  device_.record(written_, device_.transfer_stream());
  card_.assign(reinterpret_cast<const char*>(&card), sizeof card);
}

IpcProof::~IpcProof() {
  try {
    if (written_ != 0 && !device_.reached(written_)) keep_for_good(std::move(mark_));
  } catch (const std::exception&) {
    // CUDA has failed for this process.
    keep_for_good(std::move(mark_));
  }
  if (written_ != 0) device_.free_event(written_);
}

std::string IpcProof::check(const std::string& card, TimePoint deadline) {
  try {
    return read(card, deadline);
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string IpcProof::read(const std::string& text, TimePoint deadline) {
  Card card;
  const uint64_t version = card.version;
  if (text.size() != sizeof card) return "it runs another version of meshcast: install one everywhere";
  std::memcpy(&card, text.data(), sizeof card);
  if (card.version != version) return "it runs another version of meshcast: install one everywhere";
  std::byte* base = driver_.open_memory(card.memory);
  // A lane may still map what lay there before; what it needs is mapped again.
  for (bool stays = true; base == nullptr && stays && Clock::now() < deadline;) {
    stays = driver_.mappings().close_others(nullptr);
    base = driver_.open_memory(card.memory);
    if (base == nullptr && stays) std::this_thread::sleep_for(kPause);
  }
  if (base == nullptr) return "CUDA refuses to map it (already mapped)";
  const auto found = std::make_shared<uint64_t>(~card.mark);
  const auto stream = device_.transfer_stream();
  RoundDevice::Event theirs = 0;
  RoundDevice::Event over = 0;
  bool passed = true;  // nothing on the GPU uses the mapping
  std::string problem;
  try {
    theirs = driver_.open_event(card.written);
    over = device_.make_event();
    // Before the copy: one to memory that is not pinned may block until the stream comes to it.
    bool written = false;
    while (!(written = device_.reached(theirs)) && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
    if (!written) throw Error(ErrorKind::Generic, "its GPU did not write a few bytes in time");
    device_.wait(stream, theirs);
    passed = false;
    driver_.copy(stream, reinterpret_cast<std::byte*>(found.get()), base + card.offset, kMarkBytes);
    device_.record(over, stream);
    while (!(passed = device_.reached(over)) && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
    if (!passed)
      problem = "its GPU did not write a few bytes in time";
    else if (*found != card.mark)
      problem = "other bytes are there than it has written";
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (passed)
    driver_.close_memory(base);
  else
    keep_for_good(found);  // the copy may come yet: then the memory stays mapped, too
  for (const RoundDevice::Event event : {theirs, over})
    if (event != 0) device_.free_event(event);
  return problem;
}

}  // namespace meshcast
