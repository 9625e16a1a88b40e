#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/numbers.h"
#include "rounds/device.h"

namespace meshcast::testing {

// GPUs and a communicator that only record what is enqueued; run() then does it in a random order among all
// that streams, events and NCCL allow. Bytes move as late and memory is spoilt as early as they may: what a
// group will receive is garbage from the moment its group begins. Mistakes in the use of the interfaces are
// collected.
class FakeCluster {
 public:
  static constexpr RoundDevice::Stream kCaller = 0;
  static constexpr RoundDevice::Stream kKernels = 1;
  static constexpr RoundDevice::Stream kTransfer = 2;
  static constexpr RoundDevice::Stream kOtherCaller = 3;
  static constexpr RoundDevice::Stream kGate = 4;
  static constexpr size_t kStreams = 5;

  struct Message {
    bool send = false;
    int32_t peer = -1;
    std::byte* data = nullptr;
    int64_t nbytes = 0;
    bool through = false;
  };

  struct Item {
    enum class Kind : uint8_t { Record, Wait, Kernel, Group } kind = Kind::Kernel;
    RoundDevice::Event event = 0;
    std::function<bool()> until;  // Wait: in place of an event of this rank
    size_t count = 0;             // Record: how often the event had been recorded; Wait: what it waits for
    std::function<void()> kernel;
    std::vector<Message> messages;
    bool begun = false;
  };

  struct Rank {
    std::array<std::deque<Item>, kStreams> streams;
    std::vector<size_t> recorded{0};  // by event: how often, as enqueued; event 0 is never given out
    // By event and record. A wait is for the record that was the last when it was enqueued, whatever comes
    // later.
    std::vector<std::vector<char>> reached{{1}};
    std::set<RoundDevice::Event> freed;
    int64_t events_alive = 0;
    int64_t staging_alive = 0;  // allocations that somebody still holds
    int group_depth = 0;
    std::vector<Message> group;
    int busy_polls = 0;  // polls for which NCCL is still in progress after a group
    int polls_left = 0;
    GroupOutcome failure;  // what async_error says from now on, unless Success
    bool hangs = false;    // its groups never begin
    bool lost = false;     // CUDA has failed for the process
    bool refuses = false;  // takes no message
    bool aborted = false;
    int64_t groups = 0;
  };

  explicit FakeCluster(int world) : ranks(static_cast<size_t>(world)) {}

  std::vector<Rank> ranks;
  std::vector<std::string> mistakes;

  Rank& rank(int32_t r) { return ranks[static_cast<size_t>(r)]; }

  void enqueue(int32_t r, RoundDevice::Stream caller, std::function<void()> kernel) {
    Item item;
    item.kernel = std::move(kernel);
    rank(r).streams[caller].push_back(std::move(item));
  }

  // Until nothing can go on, or after so many steps. Returns whether all of it is through. Each time some
  // streams, or the bytes on the wire, are far ahead of the others wherever they may: races show in different
  // orders.
  bool run(std::mt19937& rng, int64_t steps = INT64_MAX) {
    std::array<uint64_t, kStreams + 1> weight{};  // of the streams, and of messages
    for (uint64_t& w : weight) w = uint64_t{1} << (6 * (rng() % 4));
    for (; steps > 0; --steps) {
      std::vector<std::pair<int32_t, size_t>> able;
      std::vector<uint64_t> weights;
      for (size_t r = 0; r < ranks.size(); ++r) {
        for (size_t s = 0; s < kStreams; ++s) {
          if (!able_to_go(static_cast<int32_t>(r), s)) continue;
          able.emplace_back(static_cast<int32_t>(r), s);
          weights.push_back(weight[s]);
        }
      }
      const auto pairs = matches();
      if (able.empty() && pairs.empty()) break;
      weights.resize(able.size() + pairs.size(), weight[kStreams]);
      const size_t pick = std::discrete_distribution<size_t>(weights.begin(), weights.end())(rng);
      if (pick < able.size())
        go(able[pick].first, able[pick].second);
      else
        move(pairs[pick - able.size()]);
    }
    for (const Rank& r : ranks)
      for (const auto& stream : r.streams)
        if (!stream.empty()) return false;
    return true;
  }

 private:
  struct Match {
    int32_t from = -1;
    int32_t to = -1;
    Message* send = nullptr;
    Message* recv = nullptr;
  };

  bool able_to_go(int32_t r, size_t stream) {
    Rank& me = rank(r);
    if (me.streams[stream].empty()) return false;
    const Item& item = me.streams[stream].front();
    if (item.kind == Item::Kind::Wait)
      return item.until ? item.until() : me.reached[item.event][item.count] != 0;
    if (item.kind != Item::Kind::Group) return true;
    if (me.aborted) return true;
    if (!item.begun) return !me.hangs;
    return std::all_of(item.messages.begin(), item.messages.end(), [](const Message& m) { return m.through; });
  }

  void go(int32_t r, size_t stream) {
    Rank& me = rank(r);
    Item& item = me.streams[stream].front();
    if (item.kind == Item::Kind::Group && (!item.begun || me.aborted)) {
      item.begun = true;
      // Also what an aborted group leaves behind.
      for (const Message& m : item.messages)
        if (!m.send) std::memset(m.data, 0xA5, static_cast<size_t>(m.nbytes));
      if (!me.aborted) return;
    }
    if (item.kind == Item::Kind::Record) me.reached[item.event][item.count] = 1;
    if (item.kind == Item::Kind::Kernel) item.kernel();
    me.streams[stream].pop_front();
  }

  // The first messages of every pair that both ends have under way and that are not complete.
  std::vector<Match> matches() {
    std::map<std::pair<int32_t, int32_t>, std::array<Message*, 2>> first;
    for (size_t r = 0; r < ranks.size(); ++r) {
      auto& transfer = ranks[r].streams[kTransfer];
      if (ranks[r].aborted || transfer.empty() || !transfer.front().begun) continue;
      for (Message& m : transfer.front().messages) {
        const auto me = static_cast<int32_t>(r);
        const auto pair = m.send ? std::pair{me, m.peer} : std::pair{m.peer, me};
        Message*& place = first[pair][m.send ? 0 : 1];
        if (!m.through && place == nullptr) place = &m;
      }
    }
    std::vector<Match> out;
    for (auto& [pair, ends] : first)
      if (ends[0] != nullptr && ends[1] != nullptr) out.push_back({pair.first, pair.second, ends[0], ends[1]});
    return out;
  }

  void move(const Match& match) {
    if (match.send->nbytes != match.recv->nbytes)
      mistakes.push_back("a send of " + std::to_string(match.send->nbytes) + " bytes from rank " +
                         std::to_string(match.from) + " met a receive of " +
                         std::to_string(match.recv->nbytes) + " bytes on rank " + std::to_string(match.to));
    std::memcpy(match.recv->data, match.send->data,
                static_cast<size_t>(std::min(match.send->nbytes, match.recv->nbytes)));
    match.send->through = match.recv->through = true;
  }
};

// One number into another format, as torch does it where too large ones for float8_e4m3fn become 448.
inline void cast_element(const std::byte* from, ElementType from_type, std::byte* to, ElementType to_type) {
  float number = 0;
  visit_cast(from_type, [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    number = to_float(value);
  });
  visit_cast(to_type, [&](auto value) {
    round_to(number, &value);
    std::memcpy(to, &value, sizeof value);
  });
}

inline void move_box(const BoxMove& box) {
  if (box.from_type == box.to_type) return copy(box.from, box.to);
  int64_t count = 1;
  for (int d = 0; d < box.from.ndim; ++d) count *= box.from.extent[static_cast<size_t>(d)];
  for (int64_t i = 0; i < count; ++i) {
    std::byte* from = box.from.data;
    std::byte* to = box.to.data;
    int64_t rest = i;
    for (int d = box.from.ndim; d-- > 0;) {
      const auto at = static_cast<size_t>(d);
      from += rest % box.from.extent[at] * box.from.stride[at];
      to += rest % box.from.extent[at] * box.to.stride[at];
      rest /= box.from.extent[at];
    }
    cast_element(from, box.from_type, to, box.to_type);
  }
}

// One rank's GPU in a FakeCluster.
class FakeDevice : public RoundDevice {
 public:
  using Item = FakeCluster::Item;

  FakeDevice(FakeCluster& cluster, int32_t rank) : cluster_(cluster), rank_(rank) {}

  Stream kernel_stream() override { return FakeCluster::kKernels; }
  Stream transfer_stream() override { return FakeCluster::kTransfer; }

  Event make_event() override {
    me().recorded.push_back(0);
    me().reached.push_back({1});  // an event that was never recorded holds nobody up
    ++me().events_alive;
    return me().recorded.size() - 1;
  }
  void free_event(Event event) noexcept override {
    --me().events_alive;
    me().freed.insert(event);
  }

  void record(Event event, Stream stream) override {
    alive(event);
    Item item;
    item.kind = Item::Kind::Record;
    item.event = event;
    item.count = ++me().recorded[event];
    me().reached[event].push_back(0);
    me().streams[stream].push_back(std::move(item));
  }
  void wait(Stream stream, Event event) override {
    alive(event);
    Item item;
    item.kind = Item::Kind::Wait;
    item.event = event;
    item.count = me().recorded[event];  // of what was recorded so far
    me().streams[stream].push_back(std::move(item));
  }
  bool reached(Event event) override {
    if (me().lost) throw Error(ErrorKind::Generic, "the GPU is lost");
    return me().reached[event].back() != 0;
  }

  std::shared_ptr<std::byte> allocate(int64_t nbytes) override {
    ++me().staging_alive;
    std::shared_ptr<std::byte> out(new std::byte[static_cast<size_t>(nbytes)],
                                   [&alive = me().staging_alive](const std::byte* data) {
                                     --alive;
                                     delete[] data;
                                   });
    std::memset(out.get(), 0x5A, static_cast<size_t>(nbytes));
    return out;
  }

  void move_boxes(Stream stream, std::span<const BoxMove> boxes) override {
    check_types(boxes);
    kernel(stream, [boxes = std::vector<BoxMove>(boxes.begin(), boxes.end())] {
      for (const BoxMove& box : boxes) move_box(box);
    });
  }
  void reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) override {
    kernel(stream, [boxes = std::vector<BoxReduce>(boxes.begin(), boxes.end())] {
      for (const BoxReduce& box : boxes) {
        combine(box.own, box.carried, box.type, box.op);
        if (box.divisor > 1) divide(box.carried, box.own.nbytes(), box.type, box.divisor);
      }
    });
  }

  GroupOutcome group_start() override {
    used();
    if (me().polls_left > 0) cluster_.mistakes.emplace_back("a group while the last is in progress");
    if (++me().group_depth != 1) cluster_.mistakes.emplace_back("a group inside a group");
    return {};
  }
  GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override {
    return add({true, peer, const_cast<std::byte*>(data), nbytes}, stream);  // only read
  }
  GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer, Stream stream) override {
    return add({false, peer, data, nbytes}, stream);
  }
  GroupOutcome group_end() override {
    used();
    if (--me().group_depth != 0) cluster_.mistakes.emplace_back("the end of a group that was not begun");
    Item item;
    item.kind = Item::Kind::Group;
    item.messages = std::exchange(me().group, {});
    me().streams[FakeCluster::kTransfer].push_back(std::move(item));
    ++me().groups;
    me().polls_left = me().busy_polls;
    return {me().polls_left > 0 ? GroupState::InProgress : GroupState::Success, false, {}};
  }
  GroupOutcome async_error() override {
    used();
    if (me().failure.state == GroupState::Failed) return me().failure;
    if (me().polls_left == 0) return {};
    if (me().busy_polls > 0) --me().polls_left;
    return {me().polls_left > 0 ? GroupState::InProgress : GroupState::Success, false, {}};
  }
  void abort() noexcept override {
    used();
    me().aborted = true;
  }

 private:
  FakeCluster::Rank& me() { return cluster_.rank(rank_); }

  void alive(Event event) {
    if (me().freed.contains(event)) cluster_.mistakes.emplace_back("an event that has been freed is used");
  }

  void used() {
    if (me().aborted) cluster_.mistakes.emplace_back("a communicator that has been aborted is used");
  }

  GroupOutcome add(FakeCluster::Message message, Stream stream) {
    used();
    if (me().group_depth != 1) cluster_.mistakes.emplace_back("a message outside of a group");
    if (stream != FakeCluster::kTransfer) cluster_.mistakes.emplace_back("a message on another stream");
    if (message.data == nullptr) cluster_.mistakes.emplace_back("a message without memory");
    if (me().refuses) return {GroupState::Failed, false, "invalid argument", message.peer};
    me().group.push_back(message);
    return {};
  }

  void kernel(Stream stream, std::function<void()> work) {
    if (stream != FakeCluster::kKernels) cluster_.mistakes.emplace_back("a kernel on another stream");
    Item item;
    item.kernel = std::move(work);
    me().streams[stream].push_back(std::move(item));
  }

  // Kernels read elements as wide as their types, and are launched once for each pair of types that follow one
  // another.
  void check_types(std::span<const BoxMove> boxes) {
    std::set<std::pair<ElementType, ElementType>> before;
    std::pair<ElementType, ElementType> last;
    for (size_t i = 0; i < boxes.size(); ++i) {
      const BoxMove& box = boxes[i];
      const bool casts = box.from_type != box.to_type;
      const bool fits = casts ? box.from.element_bytes == size_of(box.from_type) &&
                                    box.to.element_bytes == size_of(box.to_type)
                              : box.from.element_bytes == box.to.element_bytes;
      if (!fits) cluster_.mistakes.emplace_back("a box whose elements are not as wide as their types");
      const auto types =
          casts ? std::pair{box.from_type, box.to_type} : std::pair{ElementType::None, ElementType::None};
      const bool fresh = before.insert(types).second;
      if (i > 0 && types != last && !fresh)
        cluster_.mistakes.emplace_back("boxes of like types are not together");
      last = types;
    }
  }

  FakeCluster& cluster_;
  const int32_t rank_;
};

}  // namespace meshcast::testing
