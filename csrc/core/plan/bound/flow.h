#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meshcast {

// Maximum flow by blocking flows (Dinic), integer capacities.
class FlowNetwork {
 public:
  explicit FlowNetwork(int32_t nodes) : first_(static_cast<size_t>(nodes), -1) {}

  // Returns the edge's number, to be used with set_capacity.
  int32_t add_edge(int32_t from, int32_t to, int64_t capacity);
  // Takes effect at the next call of `maximum`, which starts from no flow.
  void set_capacity(int32_t edge, int64_t capacity) { capacity_[static_cast<size_t>(edge)] = capacity; }

  int64_t maximum(int32_t source, int32_t sink);
  // Augments the current flow to a maximum, and returns the increase. Never reduces the flow on edges into the
  // sink.
  int64_t augment(int32_t source, int32_t sink);
  // As set_capacity, but keeps the flow, which must not exceed the new capacity.
  void raise_capacity(int32_t edge, int64_t capacity);
  int64_t flow(int32_t edge) const {
    return capacity_[static_cast<size_t>(edge)] - left_[static_cast<size_t>(edge)];
  }
  // After `maximum` or `augment`: true if the node is on the source's side of a minimum cut.
  bool on_source_side(int32_t node) const { return depth_[static_cast<size_t>(node)] >= 0; }

 private:
  bool layer(int32_t source, int32_t sink);
  int64_t push(int32_t node, int32_t sink, int64_t limit);

  std::vector<int32_t> first_, next_, to_;
  std::vector<int64_t> capacity_, left_;
  std::vector<int32_t> depth_, cursor_, queue_;
};

}  // namespace meshcast
