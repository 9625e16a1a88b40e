#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "common/checked.h"
#include "plan/stable_order.h"
#include "plan/strategies/rotation.h"
#include "plan/strategies/turns.h"

namespace meshcast {
namespace {

// Sends of bundles with as many receivers each, those of a bundle next to each other.
using Layer = std::vector<Send>;

// Nanoseconds of the busiest port of each kind.
struct Load {
  int64_t out = 0;
  int64_t in = 0;
  int64_t inside = 0;  // hosts

  int64_t nics() const { return std::max(out, in); }
};

Load find_load(const Inputs& in, const Layer& layer) {
  std::vector<int64_t> busy(static_cast<size_t>(in.network.port_count()), 0);
  Load load;
  for (const Send& send : layer) {
    const bool inside = in.network.host(send.src) == in.network.host(send.dst);
    const int64_t nbytes = in.bundles[static_cast<size_t>(send.bundle)].nbytes;
    for (const auto& [port, most] : {std::pair{send.out, inside ? &load.inside : &load.out},
                                     std::pair{send.in, inside ? &load.inside : &load.in}}) {
      int64_t& ns = busy[static_cast<size_t>(port)];
      ns += transfer_ns(nbytes, in.network.port_rate(port));
      *most = std::max(*most, ns);
    }
  }
  return load;
}

// Makes the receiver of the send with index `from` the sender of `send`.
void pass_on(const Network& network, const Layer& layer, size_t from, Send* send) {
  send->src = layer[from].dst;
  const Network::Link link = network.link(send->src, send->dst);
  send->out = link.out;
  send->in = link.in;
  send->after = static_cast<int32_t>(from);
}

// If several ranks of a host get a bundle from another host, the first passes it on to the others. Returns
// whether there are any.
bool copy_inside(const Network& network, Layer* layer) {
  bool out = false;
  size_t first = 0;  // of the current bundle and host
  for (size_t i = 1; i < layer->size(); ++i) {
    Send& send = (*layer)[i];
    const Send& before = (*layer)[first];
    if (send.bundle != before.bundle || network.host(send.dst) != network.host(before.dst)) {
      first = i;
    } else if (network.host(send.src) != network.host(send.dst)) {
      pass_on(network, *layer, first, &send);
      out = true;
    }
  }
  return out;
}

// Cuts the turns into `parts` of equal length. Receivers of a bundle in one part pass it on in the next, turn
// by turn, instead of the first sender. So senders still do not meet.
//
// Example. One sender has a bundle for four hosts, and there are two parts: it sends to host 0 in turn 0 and to
// host 1 in turn 1. In turn 2 host 0 sends to host 2, and in turn 3 host 1 to host 3.
void relay(const Network& network, int64_t parts, Layer* layer) {
  for (auto first = layer->begin(); first != layer->end();) {
    const auto last =
        std::find_if(first, layer->end(), [&](const Send& s) { return s.bundle != first->bundle; });
    const auto length = static_cast<int32_t>(ceil_div(std::prev(last)->turn + 1, parts));
    for (auto send = first; send != last; ++send) {
      if (send->after >= 0) continue;
      Send wanted = *send;
      wanted.turn -= length;
      const auto before = std::lower_bound(first, send, wanted, earlier);
      // Hosts may differ in their ranks: then some have no rank that passes it on.
      if (before == send || earlier(wanted, *before)) continue;
      pass_on(network, *layer, static_cast<size_t>(before - layer->begin()), &*send);
    }
    first = last;
  }
}

// Puts a layer in turns, with copies inside hosts if these have enough time left and NICs then have less to do,
// and with relays if senders have more to do than receivers. Returns the time of the busiest NIC.
int64_t arrange(const Inputs& in, int64_t* inside_left, Layer* layer) {
  set_turns(in.network, layer);
  std::stable_sort(layer->begin(), layer->end(), [](const Send& a, const Send& b) {
    return std::tie(a.bundle, a.turn, a.turn_inside) < std::tie(b.bundle, b.turn, b.turn_inside);
  });
  Load load = find_load(in, *layer);
  Layer copied = *layer;
  if (copy_inside(in.network, &copied)) {
    const Load with_copies = find_load(in, copied);
    if (with_copies.inside <= *inside_left && with_copies.nics() < load.nics()) {
      *layer = std::move(copied);
      load = with_copies;
    }
  }
  *inside_left -= load.inside;
  if (load.out > load.in) {
    relay(in.network, ceil_div(load.out, std::max<int64_t>(1, load.in)), layer);
    load = find_load(in, *layer);
  }
  return load.nics();
}

// `chunks`: by bundle.
void send_all(const Layer& layer, const std::vector<Drafter::Range>& chunks, Drafter* drafter) {
  std::vector<int64_t> turns;
  turns.reserve(layer.size());
  for (const Send& send : layer) turns.push_back((static_cast<int64_t>(send.turn) << 32) + send.turn_inside);
  std::vector<int32_t> hop(layer.size());
  for (const int32_t i : stable_order(turns)) {
    const Send& send = layer[static_cast<size_t>(i)];
    hop[static_cast<size_t>(i)] = drafter->hop_count();
    int32_t after = send.after < 0 ? -1 : hop[static_cast<size_t>(send.after)];
    const Drafter::Range range = chunks[static_cast<size_t>(send.bundle)];
    for (int32_t c = range.first; c < range.last; ++c) {
      drafter->pass_on(c, send.src, send.dst, after);
      if (after >= 0) ++after;
    }
  }
}

}  // namespace

Layers::Layers(const Inputs& in) {
  // By the number of receivers of a bundle, the most first: copies inside hosts overlap with the next layers.
  std::map<size_t, std::vector<Send>, std::greater<>> layers;
  for (const Send& send : choose_sends(in, nullptr))
    layers[in.lead(in.bundles[static_cast<size_t>(send.bundle)]).receivers.size()].push_back(send);
  if (layers.size() < 2) return;
  int64_t in_all_ns = in.network.latency_ns();
  int64_t inside_left_ns = in.bound_ns / 2;
  for (auto& [_, layer] : layers) in_all_ns += arrange(in, &inside_left_ns, &layer);
  if (in_all_ns > good_ns(in.bound_ns)) return;
  for (auto& [_, layer] : layers) layers_.push_back(std::move(layer));
}

Draft Layers::draft(const Inputs& in) const {
  if (layers_.empty()) return {};
  Drafter drafter(in.tasks, in.problems, in.network);
  std::vector<Drafter::Range> chunks;
  for (const Bundle& bundle : in.bundles) chunks.push_back(drafter.cut(bundle, in.chunk_bytes));
  int64_t hops = 0;
  for (const Layer& layer : layers_)
    for (const Send& send : layer)
      hops += chunks[static_cast<size_t>(send.bundle)].last - chunks[static_cast<size_t>(send.bundle)].first;
  drafter.reserve(hops);
  for (const Layer& layer : layers_) send_all(layer, chunks, &drafter);
  return drafter.take();
}

Draft draft_layers(const Inputs& in) { return Layers(in).draft(in); }

}  // namespace meshcast
