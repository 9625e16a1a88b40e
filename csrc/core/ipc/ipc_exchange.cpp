#include "ipc/ipc_exchange.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "common/keep_for_good.h"
#include "ipc/staging_pool.h"

namespace meshcast {
namespace {

constexpr int64_t kBounceAlignment = 256;

constexpr int64_t aligned(int64_t nbytes) {
  return (nbytes + kBounceAlignment - 1) / kBounceAlignment * kBounceAlignment;
}

}  // namespace

IpcExchange::Peer::Peer(IpcPeer introduced, IpcDriver& driver, RoundDevice& device)
    : link(std::move(introduced.link)), imports(driver, device) {
  ready = driver.open_event(introduced.card.ready);
  copied = driver.open_event(introduced.card.copied);
}

IpcExchange::IpcExchange(IpcDriver& driver, RoundDevice& device)
    : driver_(driver), device_(device), stream_(device.transfer_stream()), exports_(driver) {}

std::unique_ptr<IpcExchange> IpcExchange::connect(IpcDriver& driver, RoundDevice& device, IpcMeeting& meeting,
                                                  const std::vector<std::string>& addresses, int32_t rank,
                                                  TimePoint deadline, const std::function<void()>& checkpoint) {
  std::unique_ptr<IpcExchange> out(new IpcExchange(driver, device));
  IpcCard card;
  out->ready_ = driver.make_ipc_event(&card.ready);
  out->over_ = device.make_event();
  std::map<int32_t, Event> copied;
  try {
    const auto card_for = [&](int32_t peer) {
      copied[peer] = driver.make_ipc_event(&card.copied);
      return card;
    };
    for (IpcPeer& each : meeting.meet(addresses, rank, card_for, deadline, checkpoint)) {
      Peer& peer = out->peers_.emplace_back(std::move(each), driver, device);
      peer.own_copied = copied.extract(peer.link.peer()).mapped();
    }
  } catch (...) {
    for (const auto& [peer, event] : copied) out->free_event(event);
    throw;
  }
  return out;
}

IpcExchange::~IpcExchange() {
  abort();  // does nothing to what is closed
  bool passed = closed_;
  try {
    passed = passed || (over_recorded_ && device_.reached(over_));
  } catch (const std::exception&) {
    // CUDA has failed for this process.
  }
  // The GPU may still copy: then its sources stay mapped, and memory that peers read stays allocated.
  for (Peer& peer : peers_) {
    peer.imports.leave();  // before its event goes
    if (passed) peer.imports.close_all();
    for (const Event event : {peer.ready, peer.copied, peer.own_copied}) free_event(event);
  }
  if (!passed)
    for (auto& bounce : bounces_) keep_for_good(std::move(bounce));
  free_event(ready_);
  free_event(over_);
}

// An event that was never made is 0.
void IpcExchange::free_event(Event event) noexcept {
  if (event != 0) device_.free_event(event);
}

IpcExchange::Peer& IpcExchange::peer(int32_t number) {
  for (Peer& each : peers_)
    if (each.link.peer() == number) return each;
  throw std::logic_error(fmt::format("rank {} of the group is no peer of this one", number));
}

void IpcExchange::start() {
  if (in_progress_) throw std::logic_error("a group over CUDA IPC began inside another");
  in_progress_ = true;
  ++now_;
}

GroupOutcome IpcExchange::send(const std::byte* data, int64_t nbytes, int32_t number) {
  if (failure_.state == GroupState::Failed) return failure_;
  peer(number).sends.push_back({data, nbytes});
  return {};
}

GroupOutcome IpcExchange::recv(std::byte* data, int64_t nbytes, int32_t number) {
  if (failure_.state == GroupState::Failed) return failure_;
  peer(number).receives.push_back({data, nbytes});
  return {};
}

GroupOutcome IpcExchange::end() {
  if (failure_.state == GroupState::Failed) return failure_;
  name_messages();
  return progress();
}

void IpcExchange::name_messages() {
  // Phase 1: the bytes that cannot be exported, so that one buffer holds all copies of the group.
  int64_t bounced = 0;
  bool any = false;
  for (const Peer& to : peers_) {
    for (const Outgoing& message : to.sends) {
      any = true;
      if (!exports_.find(message.data, now_)) bounced += aligned(message.nbytes);
    }
  }
  if (!any) return;
  bounce(bounced);
  bounced = 0;
  // Phase 2: the address of each message. This enqueues the copies into the buffer, so the event comes after
  // it.
  std::vector<std::vector<IpcExports::Place>> places;
  for (const Peer& to : peers_) {
    auto& mine = places.emplace_back();
    for (const Outgoing& message : to.sends) mine.push_back(place_of(message, &bounced));
  }
  // Phase 3: one event for all messages of the group, to all receivers.
  device_.record(ready_, stream_);
  tell_forgotten();
  // Phase 4: the notes. Those about memory come before the first message that names it, on the same socket,
  // so the receiver never meets a name that it does not know.
  for (size_t p = 0; p < peers_.size(); ++p) {
    Peer& to = peers_[p];
    if (to.sends.empty()) continue;
    for (size_t i = 0; i < to.sends.size(); ++i) {
      const IpcExports::Place& place = places[p][i];
      IpcNote note;
      note.memory = place.memory;
      if (const auto [known, fresh] = to.told.emplace(place.memory, nullptr); fresh) {
        const IpcExports::Entry& entry = exports_.entry(place.memory);
        if (driver_.staging().show(entry.range.base)) known->second = entry.range.base;
        note.kind = IpcNote::Kind::Memory;
        note.nbytes = entry.range.nbytes;
        note.handle = entry.handle;
        tell(to, note);
      }
      note.kind = IpcNote::Kind::Message;
      note.last = i + 1 == to.sends.size() ? 1 : 0;
      note.group = to.groups_sent;
      note.offset = place.offset;
      note.nbytes = to.sends[i].nbytes;
      tell(to, note);
    }
    ++to.groups_sent;
    to.sends.clear();
    to.waits_for_copied = true;
  }
}

// The stream has passed what it held of the group before when it comes to this one's copies.
void IpcExchange::bounce(int64_t nbytes) {
  if (nbytes <= bounce_bytes_) return;
  bounce_bytes_ = std::max(nbytes, 2 * bounce_bytes_);
  bounces_.push_back(driver_.allocate_exportable(bounce_bytes_));
}

void IpcExchange::tell_forgotten() {
  IpcNote note;
  note.kind = IpcNote::Kind::Forget;
  for (const uint64_t memory : exports_.take_forgotten()) {
    note.memory = memory;
    for (Peer& to : peers_) {
      if (auto known = to.told.extract(memory); !known.empty()) {
        to.leaving.insert(std::move(known));
        tell(to, note);
      }
    }
  }
}

void IpcExchange::retire(const std::byte* base) {
  if (closed_ || aborted_) return;
  exports_.forget_at(base);
  for (const Peer& to : peers_)  // of before staging grew
    for (const auto& [memory, block] : to.told)
      if (block != nullptr) exports_.forget_at(block);
  for (const auto& each : bounces_) exports_.forget_at(each.get());
  bounces_.clear();
  bounce_bytes_ = 0;
  tell_forgotten();
}

bool IpcExchange::rest() {
  if (closed_ || aborted_) return false;
  bool more = false;
  for (Peer& each : peers_) {
    flush(each);
    listen(each);
    answer(each);
    more = more || !each.leaving.empty() || !each.outbox.empty();
  }
  return more;
}

// Closes what the peer has said to forget, and says so.
void IpcExchange::answer(Peer& to) {
  to.imports.sweep();
  IpcNote note;
  note.kind = IpcNote::Kind::Closed;
  for (const uint64_t memory : to.imports.take_closed()) {
    note.memory = memory;
    if (!to.closed && !to.gone) tell(to, note);
  }
}

// The peer has nothing of this rank mapped any longer.
void IpcExchange::close_for(Peer& who) {
  for (auto* memories : {&who.told, &who.leaving}) {
    for (const auto& [memory, base] : *memories) driver_.staging().hide(base);
    memories->clear();
  }
}

IpcExports::Place IpcExchange::place_of(const Outgoing& message, int64_t* bounced) {
  if (const auto place = exports_.find(message.data, now_)) return *place;
  std::byte* const to = bounces_.back().get() + *bounced;
  *bounced += aligned(message.nbytes);
  driver_.copy(stream_, to, message.data, message.nbytes);
  const auto place = exports_.find(to, now_);
  if (!place) throw Error(ErrorKind::Generic, "CUDA does not export the memory that was made for it");
  return *place;
}

void IpcExchange::tell(Peer& to, const IpcNote& note) {
  flush(to);
  if (!to.outbox.empty() || !to.link.send(note)) to.outbox.push_back(note);
}

void IpcExchange::flush(Peer& to) {
  while (!to.outbox.empty() && to.link.send(to.outbox.front())) to.outbox.pop_front();
}

void IpcExchange::listen(Peer& from) {
  IpcNote note;
  while (!from.closed && !from.gone) {
    const IpcLink::Got got = from.link.receive(&note);
    if (got == IpcLink::Got::Nothing) return;
    if (got == IpcLink::Got::End)
      from.gone = true;
    else
      hear(from, note);
  }
  if (from.closed || from.gone) close_for(from);
}

void IpcExchange::hear(Peer& from, const IpcNote& note) {
  switch (note.kind) {
    case IpcNote::Kind::Memory: from.imports.add(note.memory, note.handle, note.nbytes); break;
    case IpcNote::Kind::Message: from.inbox.push_back(note); break;
    case IpcNote::Kind::Copied: from.has_copied = true; break;
    case IpcNote::Kind::Forget: from.imports.forget(note.memory); break;
    case IpcNote::Kind::Closed:
      if (const auto left = from.leaving.extract(note.memory); !left.empty())
        driver_.staging().hide(left.mapped());
      break;
    case IpcNote::Kind::Bye: from.closed = true; break;
    default:
      throw Error(ErrorKind::Generic, "a peer does not speak this protocol: install one version everywhere");
  }
}

// If the peer has closed its group since, its GPU is done and its event may be destroyed: all its notes from
// before are read before this.
void IpcExchange::await_copied(Peer& by) {
  if (!std::exchange(by.has_copied, false)) return;
  if (!by.closed) device_.wait(stream_, by.copied);
  by.waits_for_copied = false;
}

void IpcExchange::copy_messages(Peer& from) {
  // Notes in the inbox may be of a group that this rank has not begun: then nothing is expected, and they stay
  // there.
  const bool any = !from.receives.empty();
  while (!from.receives.empty() && !from.inbox.empty()) {
    const IpcNote note = from.inbox.front();
    const Incoming into = from.receives.front();
    const bool last = note.last != 0;
    const bool last_expected = from.receives.size() == 1;
    if (note.group != from.groups_received || note.nbytes != into.nbytes || last != last_expected) {
      failure_ =
          failed(from, false,
                 fmt::format("sends {} bytes in group {}{}, where {} bytes in group {}{} are expected: the "
                             "ranks do not run the same rounds",
                             note.nbytes, note.group, last ? ", its last" : "", into.nbytes,
                             from.groups_received, last_expected ? ", its last" : ""));
      return;
    }
    const std::byte* const data = from.imports.at(note.memory, note.offset, note.nbytes);
    if (data == nullptr) return;
    from.inbox.pop_front();
    from.receives.pop_front();
    if (!std::exchange(from.awaited, true)) device_.wait(stream_, from.ready);
    driver_.copy(stream_, into.data, data, into.nbytes);
  }
  if (!any || !from.receives.empty()) return;
  from.awaited = false;
  ++from.groups_received;
  device_.record(from.own_copied, stream_);
  from.imports.used_until(from.own_copied);
  IpcNote note;
  note.kind = IpcNote::Kind::Copied;
  tell(from, note);
}

GroupOutcome IpcExchange::progress() {
  bool more = false;
  for (Peer& each : peers_) {
    if (failure_.state == GroupState::Failed) return failure_;
    flush(each);
    listen(each);
    await_copied(each);
    if (in_progress_) copy_messages(each);
    answer(each);
    const bool needed = !each.outbox.empty() || !each.receives.empty() || each.waits_for_copied;
    more = more || needed;
    // Where nothing more is needed of a peer, what it has enqueued may still be under way: if it has ended
    // without a Bye, its memory may have changed.
    if (each.gone) failure_ = failed(each, true, "has ended, or has given its group up");
    if (each.closed && needed) failure_ = failed(each, true, "has closed its group");
  }
  if (failure_.state == GroupState::Failed) return failure_;
  if (more) return {GroupState::InProgress, false, {}};
  in_progress_ = false;
  return {};
}

GroupOutcome IpcExchange::failed(const Peer& who, bool remote, const std::string& text) {
  return {GroupState::Failed, remote, text, who.link.peer()};
}

void IpcExchange::close() noexcept {
  if (aborted_ || std::exchange(closed_, true)) return;
  try {
    for (Peer& each : peers_) {
      each.imports.close_all();
      tell(each, {});
    }
  } catch (const std::exception&) {
    // Out of memory: the peers will count this rank as lost, if they still need it.
  }
  for (Peer& each : peers_) part_from(each);
}

// What the peer still has mapped is so until it closes its group as well.
void IpcExchange::part_from(Peer& from) noexcept {
  try {
    listen(from);
    std::vector<const std::byte*> bases;
    for (const auto* memories : {&from.told, &from.leaving})
      for (const auto& [memory, base] : *memories) bases.push_back(base);
    from.link.stop_sending();
    if (!bases.empty()) driver_.staging().part(std::move(from.link), std::move(bases));
  } catch (const std::exception&) {
    // Out of memory, or a peer of another version: its blocks count as mapped for good.
    from.link.hang_up();
  }
}

void IpcExchange::abort() noexcept {
  if (closed_ || std::exchange(aborted_, true)) return;
  for (const Peer& each : peers_) each.link.hang_up();
  if (failure_.state != GroupState::Failed) failure_ = {GroupState::Failed, false, "it was aborted", -1};
  try {
    device_.record(over_, stream_);
    over_recorded_ = true;
  } catch (const std::exception&) {
    // CUDA has failed for this process: nothing of the groups will be seen to end.
  }
}

}  // namespace meshcast
