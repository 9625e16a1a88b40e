#include <array>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <pybind11/stl.h>

#include "binding/bind.h"
#include "common/error.h"
#include "layout/box_tiles.h"
#include "memory/element_type.h"
#include "plan/bound/filling.h"
#include "plan/figures.h"
#include "plan/plan.h"
#include "plan/stack.h"
#include "plan/staging.h"

namespace meshcast {
namespace {

using PlacementTuple =
    std::tuple<std::string, int, int64_t, std::string>;  // kind, dim, split factor, reduce op
using PieceTuple = std::tuple<std::vector<std::pair<int64_t, int64_t>>, std::vector<int64_t>, std::vector<int>,
                              std::vector<int64_t>>;  // box, local index, axis and step of each dimension
using ShardTuple = std::tuple<std::vector<int64_t>, std::vector<PieceTuple>>;  // local shape, boxes
using HostTuple = std::tuple<std::vector<int32_t>, std::vector<std::pair<int64_t, int64_t>>, int64_t>;
using ProblemTuple = std::tuple<std::vector<int64_t>, int64_t, Layout, Layout>;

Placement placement_from(const PlacementTuple& tuple) {
  const auto& [kind, dim, split_factor, op] = tuple;
  if (kind == "replicate") return Placement{};
  if (kind == "shard") return Placement{PlacementKind::Shard, dim, 1, ReduceOp::None};
  if (kind == "strided_shard") return Placement{PlacementKind::StridedShard, dim, split_factor, ReduceOp::None};
  if (kind == "partial") return Placement{PlacementKind::Partial, 0, 1, parse_reduce_op(op)};
  throw LayoutError("placement kind '" + kind + "' is none of replicate, shard, strided_shard, partial");
}

template <typename To, typename From>
std::array<To, kMaxDims> of_dims(const std::vector<From>& values) {
  if (values.size() > kMaxDims)
    throw LayoutError("a box of " + std::to_string(values.size()) + " dimensions: at most " +
                      std::to_string(kMaxDims) + " are supported");
  std::array<To, kMaxDims> out{};
  for (size_t d = 0; d < values.size(); ++d) out[d] = static_cast<To>(values[d]);
  return out;
}

// Places without axes: the boxes have the dimensions of the local tensor.
Shard shard_from(int32_t rank, const ShardTuple& tuple) {
  const auto& [local_shape, pieces] = tuple;
  Shard shard{rank, local_shape, {}, {}};
  for (const auto& [box, local, axis, step] : pieces) {
    ShardPiece piece{{static_cast<int>(box.size()), {}, {}}, of_dims<int64_t>(local)};
    std::vector<int64_t> lo;
    std::vector<int64_t> hi;
    for (const auto& [low, high] : box) {
      lo.push_back(low);
      hi.push_back(high);
    }
    piece.box.lo = of_dims<int64_t>(lo);
    piece.box.hi = of_dims<int64_t>(hi);
    shard.pieces.push_back(piece);
    if (axis.empty() && step.empty() && local_shape.size() == box.size()) continue;
    if (axis.size() != box.size() || step.size() != box.size())
      throw LayoutError("a box of " + std::to_string(box.size()) + " dimensions in a local tensor of " +
                        std::to_string(local_shape.size()) + ", with " + std::to_string(axis.size()) +
                        " axes and " + std::to_string(step.size()) + " steps: one of each for a dimension");
    for (const int each : axis) {
      if (each < 0 || each >= kMaxDims) throw LayoutError("axis " + std::to_string(each) + " of a box");
    }
    shard.places.push_back({of_dims<int8_t>(axis), of_dims<int64_t>(step)});
  }
  return shard;
}

// Ranks arrive as int32 bytes: a mesh of thousands of ranks crosses in one copy.
Layout layout_from(std::vector<int64_t> mesh_shape, const py::bytes& ranks,
                   const std::vector<PlacementTuple>& placements, const std::vector<ShardTuple>& by_boxes) {
  Layout layout;
  layout.mesh.shape = std::move(mesh_shape);
  const std::string_view raw = ranks;
  if (raw.size() % sizeof(int32_t) != 0)
    throw LayoutError("ranks: " + std::to_string(raw.size()) + " bytes are no int32 values");
  layout.mesh.ranks.resize(raw.size() / sizeof(int32_t));
  std::memcpy(layout.mesh.ranks.data(), raw.data(), layout.mesh.ranks.size() * sizeof(int32_t));
  for (const PlacementTuple& tuple : placements) layout.placements.push_back(placement_from(tuple));
  if (!by_boxes.empty() && by_boxes.size() != layout.mesh.ranks.size())
    throw LayoutError("boxes of " + std::to_string(by_boxes.size()) + " ranks for a mesh of " +
                      std::to_string(layout.mesh.ranks.size()));
  for (size_t i = 0; i < by_boxes.size(); ++i)
    layout.by_boxes.push_back(shard_from(layout.mesh.ranks[i], by_boxes[i]));
  return layout;
}

py::tuple box_tuple(const Box& box) {
  py::tuple out(static_cast<size_t>(box.ndim));
  for (int d = 0; d < box.ndim; ++d) {
    out[static_cast<size_t>(d)] =
        py::make_tuple(box.lo[static_cast<size_t>(d)], box.hi[static_cast<size_t>(d)]);
  }
  return out;
}

// [(rank, local shape, [(box, index of its first element in the local tensor)])]
py::list shards_list(const Layout& layout, const std::vector<int64_t>& shape) {
  validate(layout, shape);
  py::list out;
  for (const Shard& shard : shards(layout, shape)) {
    py::list pieces;
    for (const ShardPiece& piece : shard.pieces) {
      py::tuple local(static_cast<size_t>(piece.box.ndim));
      for (size_t d = 0; d < local.size(); ++d) local[d] = piece.local[d];
      pieces.append(py::make_tuple(box_tuple(piece.box), local));
    }
    out.append(py::make_tuple(shard.rank, py::tuple(py::cast(shard.local_shape)), pieces));
  }
  return out;
}

// [(box, ranks that hold it)], without overlaps
py::list tiles_list(const Layout& layout, const std::vector<int64_t>& shape) {
  validate(layout, shape);
  py::list out;
  for (const BoxTile& tile : box_tiles(layout, shape)) {
    py::list ranks;
    for (const auto& holder : tile.holders) ranks.append(holder.first);
    out.append(py::make_tuple(box_tuple(tile.box), ranks));
  }
  return out;
}

// Throws LayoutError unless the source holds all that the destination wants.
void check_holds(const Layout& source, const Layout& destination, const std::vector<int64_t>& shape) {
  validate(source, shape);
  validate(destination, shape);
  meet_tiles(box_tiles(source, shape), box_tiles(destination, shape));
}

// [(box, piece of the rank's shard that has it, number of ranks that want it)]
py::list counted_list(const Layout& source, const Layout& destination, const std::vector<int64_t>& shape,
                      int32_t rank) {
  validate(source, shape);
  validate(destination, shape);
  py::list out;
  for (const CountedBox& each : counted_boxes(source, destination, shape, rank))
    out.append(py::make_tuple(box_tuple(each.box), each.piece, each.times));
  return out;
}

Topology topology_from(const std::vector<HostTuple>& hosts, int64_t latency_ns) {
  Topology topology;
  topology.latency_ns = latency_ns;
  for (const auto& [ranks, nics, local_rate] : hosts) {
    Host host{ranks, {}, local_rate};
    for (const auto& [out_rate, in_rate] : nics) host.nics.push_back(Nic{out_rate, in_rate});
    topology.hosts.push_back(std::move(host));
  }
  validate(topology);
  return topology;
}

std::vector<HostTuple> hosts_of(const Topology& topology) {
  std::vector<HostTuple> out;
  for (const Host& host : topology.hosts) {
    std::vector<std::pair<int64_t, int64_t>> nics;
    for (const Nic& nic : host.nics) nics.emplace_back(nic.out_rate, nic.in_rate);
    out.emplace_back(host.ranks, std::move(nics), host.local_rate);
  }
  return out;
}

std::shared_ptr<Plan> plan_from(const std::vector<ProblemTuple>& tuples, const Topology& topology,
                                const std::string& strategy, const std::string& balance, int64_t chunk_bytes,
                                uint64_t seed) {
  std::vector<Problem> problems;
  for (const auto& [shape, element_bytes, src, dst] : tuples)
    problems.push_back(Problem{shape, element_bytes, src, dst});
  const PlanOptions options{parse_strategy(strategy), parse_balance(balance), chunk_bytes, seed};
  const py::gil_scoped_release release;
  auto [plan, stacks] = make_stacked_plan(problems, topology, options);
  if (!stacks.empty()) {
#ifdef __GLIBC__
    // The search leaves some 300 MiB of small free blocks behind a million hops, and single tensors take as
    // much.
    malloc_trim(0);
#endif
    unstack(stacks, problems, &plan);
  }
  return std::make_shared<Plan>(std::move(plan));
}

// One field of an array of structs, read in place through the buffer protocol (memoryview, numpy.asarray). It
// shares ownership of the plan, so that the view outlives every Python name of it.
struct Column {
  std::shared_ptr<Plan> plan;
  const void* first = nullptr;
  py::ssize_t itemsize = 0;
  std::string format;
  py::ssize_t count = 0;
  py::ssize_t stride = 0;
};

template <typename Row, typename Field>
Column column_of(std::shared_ptr<Plan> plan, const std::vector<Row>& rows, Field Row::*field) {
  // Enums travel as the integer below them.
  using Value = typename std::conditional_t<std::is_enum_v<Field>, std::underlying_type<Field>,
                                            std::type_identity<Field>>::type;
  static const Row none{};
  const void* first = rows.empty() ? &(none.*field) : &(rows.front().*field);
  return Column{std::move(plan),
                first,
                sizeof(Value),
                py::format_descriptor<Value>::format(),
                static_cast<py::ssize_t>(rows.size()),
                sizeof(Row)};
}

Column column(std::shared_ptr<Plan> plan, const std::string& name) {
  const Plan& p = *plan;
  if (name == "hop_src") return column_of(plan, p.hops, &Hop::src);
  if (name == "hop_dst") return column_of(plan, p.hops, &Hop::dst);
  if (name == "hop_chunk") return column_of(plan, p.hops, &Hop::chunk);
  if (name == "hop_after") return column_of(plan, p.hops, &Hop::after);
  if (name == "hop_reduce") return column_of(plan, p.hops, &Hop::reduce);
  if (name == "hop_last_reduce") return column_of(plan, p.hops, &Hop::last_reduce);
  if (name == "start_ns") return column_of(plan, p.times, &HopTime::start_ns);
  if (name == "finish_ns") return column_of(plan, p.times, &HopTime::finish_ns);
  if (name == "chunk_begin") return column_of(plan, p.chunks, &Chunk::piece_begin);
  if (name == "chunk_end") return column_of(plan, p.chunks, &Chunk::piece_end);
  if (name == "chunk_nbytes") return column_of(plan, p.chunks, &Chunk::nbytes);
  if (name == "piece_task") return column_of(plan, p.pieces, &ChunkPiece::task);
  throw py::key_error(name);
}

template <typename Rows>
const auto& at(const Rows& rows, int64_t index) {
  if (index < 0 || index >= static_cast<int64_t>(rows.size())) throw py::index_error();
  return rows[static_cast<size_t>(index)];
}

// (tensor, task, box, nbytes)
py::tuple piece_tuple(const Plan& plan, int64_t index) {
  const ChunkPiece& piece = at(plan.pieces, index);
  const int64_t element_bytes = plan.problems[static_cast<size_t>(piece.tensor)].element_bytes;
  return py::make_tuple(piece.tensor, piece.task, box_tuple(piece.box), piece.box.volume() * element_bytes);
}

py::object reduce_name(ReduceOp op) {
  return op == ReduceOp::None ? py::object(py::none()) : py::object(py::str(to_string(op)));
}

// (src, dst, first piece of the chunk, after, reduce or None, last_reduce, start_ns, finish_ns)
py::tuple hop_tuple(const Plan& plan, int64_t index) {
  const Hop& hop = at(plan.hops, index);
  const HopTime& time = at(plan.times, index);
  const int32_t piece = at(plan.chunks, hop.chunk).piece_begin;
  return py::make_tuple(hop.src, hop.dst, piece, hop.after, reduce_name(hop.reduce), hop.last_reduce,
                        time.start_ns, time.finish_ns);
}

// (tensor, box, nbytes, holders, receivers, reduce or None, contribution of each holder)
py::tuple task_tuple(const Plan& plan, int64_t index) {
  const Task& task = at(plan.tasks, index);
  return py::make_tuple(task.tensor, box_tuple(task.box), task.nbytes, py::tuple(py::cast(task.holders.list())),
                        py::tuple(py::cast(task.receivers.list())), reduce_name(task.reduce),
                        py::tuple(py::cast(task.contribution.list())));
}

// (rank, tensor, box)
py::tuple copy_tuple(const Plan& plan, int64_t index) {
  const LocalCopy& copy = at(plan.local_copies, index);
  return py::make_tuple(copy.rank, copy.tensor, box_tuple(copy.box));
}

// (dtype, reductions it has, whether kernels cast it) of every row of memory/element_types.def
py::tuple element_types() {
  py::list out;
  for (const ElementTraits& each : kElementTypes) {
    if (each.type == ElementType::None) continue;
    py::list reductions;
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product})
      if (can_reduce(each.type, op)) reductions.append(to_string(op));
    out.append(py::make_tuple(each.dtype, py::tuple(reductions), each.casts));
  }
  return py::tuple(out);
}

}  // namespace

void bind_plan(py::module_& m) {
  m.attr("STRATEGIES") = py::tuple(py::cast(strategy_names()));
  m.attr("BALANCES") = py::tuple(py::cast(balance_names()));
  m.attr("ELEMENT_TYPES") = element_types();

  py::class_<Layout>(m, "Layout")
      .def(py::init(&layout_from), py::arg("mesh_shape"), py::arg("ranks"), py::arg("placements"),
           py::arg("by_boxes") = std::vector<ShardTuple>{})
      .def("shards", &shards_list, py::arg("shape"))
      .def("tiles", &tiles_list, py::arg("shape"))
      .def("check_holds", &check_holds, py::arg("destination"), py::arg("shape"))
      .def("counted", &counted_list, py::arg("destination"), py::arg("shape"), py::arg("rank"))
      .def("describe", [](const Layout& layout) { return describe(layout); });

  py::class_<Topology>(m, "Topology")
      .def(py::init(&topology_from), py::arg("hosts"), py::arg("latency_ns"))
      .def_static("uniform", &uniform_topology, py::arg("max_rank"), py::arg("ranks_per_host"),
                  py::arg("nic_rate"), py::arg("nics_per_host"), py::arg("local_rate"), py::arg("latency_ns"))
      .def_property_readonly("hosts", &hosts_of)
      .def_readonly("latency_ns", &Topology::latency_ns)
      .def("host_index", &host_index, py::arg("ranks"));

  py::class_<Column>(m, "Column", py::buffer_protocol()).def_buffer([](Column& c) {
    return py::buffer_info(const_cast<void*>(c.first), c.itemsize, c.format, 1, {c.count}, {c.stride},
                           /*readonly=*/true);
  });

  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init(&plan_from), py::arg("problems"), py::arg("topology"), py::arg("strategy"),
           py::arg("balance"), py::arg("chunk_bytes"), py::arg("seed"))
      .def_property_readonly("strategy", [](const Plan& plan) { return to_string(plan.strategy); })
      .def_readonly("hash", &Plan::hash)
      .def_readonly("makespan_ns", &Plan::makespan_ns)
      .def_readonly("lower_bound_ns", &Plan::lower_bound_ns)
      .def_readonly("topology", &Plan::topology)
      .def_readonly("ranks", &Plan::ranks)
      .def_property_readonly("num_tasks", [](const Plan& plan) { return plan.tasks.size(); })
      .def_property_readonly("num_hops", [](const Plan& plan) { return plan.hops.size(); })
      .def_property_readonly("num_chunks", [](const Plan& plan) { return plan.chunks.size(); })
      .def_property_readonly("num_pieces", [](const Plan& plan) { return plan.pieces.size(); })
      .def_property_readonly("num_local_copies", [](const Plan& plan) { return plan.local_copies.size(); })
      .def("task", &task_tuple, py::arg("index"))
      .def("hop", &hop_tuple, py::arg("index"))
      .def("piece", &piece_tuple, py::arg("index"))
      .def("local_copy", &copy_tuple, py::arg("index"))
      .def("column", &column, py::arg("name"))
      .def("rank_traffic", &rank_traffic)
      .def("nic_traffic", &nic_traffic)
      .def("peak_staging", &peak_staging)
      .def("filling_bound_ns", &filling_bound_ns);
}

}  // namespace meshcast
