#include "plan/bound/flow.h"

#include <algorithm>
#include <tuple>

namespace meshcast {

// An edge and its reverse are numbered e and e ^ 1, so that flow can be undone without a search.
int32_t FlowNetwork::add_edge(int32_t from, int32_t to, int64_t capacity) {
  const auto edge = static_cast<int32_t>(to_.size());
  for (const auto& [a, b, c] : {std::tuple{from, to, capacity}, std::tuple{to, from, int64_t{0}}}) {
    to_.push_back(b);
    capacity_.push_back(c);
    next_.push_back(first_[static_cast<size_t>(a)]);
    first_[static_cast<size_t>(a)] = static_cast<int32_t>(to_.size()) - 1;
  }
  return edge;
}

// Breadth first over edges with room left. If the sink is not reached, the reached nodes are the source's side
// of a minimum cut.
bool FlowNetwork::layer(int32_t source, int32_t sink) {
  depth_.assign(first_.size(), -1);
  queue_.assign(1, source);
  depth_[static_cast<size_t>(source)] = 0;
  for (size_t head = 0; head < queue_.size(); ++head) {
    const int32_t node = queue_[head];
    for (int32_t e = first_[static_cast<size_t>(node)]; e >= 0; e = next_[static_cast<size_t>(e)]) {
      const int32_t to = to_[static_cast<size_t>(e)];
      if (left_[static_cast<size_t>(e)] > 0 && depth_[static_cast<size_t>(to)] < 0) {
        depth_[static_cast<size_t>(to)] = depth_[static_cast<size_t>(node)] + 1;
        queue_.push_back(to);
      }
    }
  }
  return depth_[static_cast<size_t>(sink)] >= 0;
}

// Depth is at most the number of layers, and paths alternate between items and ports: recursion stays shallow.
int64_t FlowNetwork::push(int32_t node, int32_t sink, int64_t limit) {
  if (node == sink) return limit;
  int64_t sent = 0;
  for (int32_t& e = cursor_[static_cast<size_t>(node)]; e >= 0; e = next_[static_cast<size_t>(e)]) {
    const int32_t to = to_[static_cast<size_t>(e)];
    int64_t& room = left_[static_cast<size_t>(e)];
    if (room <= 0 || depth_[static_cast<size_t>(to)] != depth_[static_cast<size_t>(node)] + 1) continue;
    const int64_t got = push(to, sink, std::min(limit - sent, room));
    room -= got;
    left_[static_cast<size_t>(e ^ 1)] += got;
    sent += got;
    if (sent == limit) break;
  }
  return sent;
}

int64_t FlowNetwork::maximum(int32_t source, int32_t sink) {
  left_ = capacity_;
  return augment(source, sink);
}

void FlowNetwork::raise_capacity(int32_t edge, int64_t capacity) {
  left_[static_cast<size_t>(edge)] += capacity - capacity_[static_cast<size_t>(edge)];
  capacity_[static_cast<size_t>(edge)] = capacity;
}

int64_t FlowNetwork::augment(int32_t source, int32_t sink) {
  int64_t total = 0;
  while (layer(source, sink)) {
    cursor_ = first_;
    total += push(source, sink, INT64_MAX);
  }
  return total;
}

}  // namespace meshcast
