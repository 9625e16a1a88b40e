"""Methods to move the tensors of a case: meshcast's strategies, plans of others on its transport, and what is
written today without it. A method gets one rank's part of a case, and groups for torch's collectives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ..base.boxes import Box, extents
from ..groups.parent import parent_group
from ..layout import Layout
from ..planning.plan import STRATEGIES, Problem
from ..resharding.reshard import reshard_, reshard_local
from ..spec import TensorSpec
from ..topology import Topology
from ..transfers.transfer import PersistentTransfer, PlanOptions
from .cases import Case, Tensor

__all__ = ["METHODS", "CaseBatch", "CaseMove", "Groups", "Method"]


class Groups:
    """Every call is collective over the whole job, also on ranks outside the group."""

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []

    def new(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        group = dist.new_group(sorted(ranks), backend=backend)
        if dist.get_rank() in ranks:
            self._made.append(group)
        return group

    def mesh(self, ranks: Any) -> DeviceMesh:
        """A mesh of these ranks (a nested list), also usable on ranks outside it."""
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        if mesh.get_coordinate() is not None:
            self._made += [mesh.get_group(dim) for dim in range(mesh.ndim)]
        return mesh

    def mesh_of(self, *layouts: Layout) -> DeviceMesh:
        """Returns the mesh of a layout, or the one that holds those of several, of one shape, one after the
        other."""
        meshes = [mesh_ranks(layout).tolist() for layout in layouts]
        return self.mesh(meshes if len(meshes) > 1 else meshes[0])

    def close(self) -> None:
        """Each of the groups; not the job's own, which a mesh of all ranks may have taken."""
        for group in dict.fromkeys(self._made):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._made.clear()
        # DTensor remembers how it redistributed, and with it meshes and their groups, whose threads look for
        # messages 100 times a second: after some cases they would take the cores from those that follow.
        redistribution = sys.modules.get("torch.distributed.tensor._redistribute")
        if redistribution is not None:
            redistribution._gen_transform_infos.cache_clear()
            redistribution.clear_redistribute_planner_cache()


@dataclass
class CaseMove:
    """One rank's part of one tensor."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    source: torch.Tensor | None = None  # local shards
    destination: torch.Tensor | None = None
    dtype: torch.dtype = torch.int32
    replicas: dict[Box, dist.ProcessGroup | None] = field(default_factory=dict)  # of the destination's tiles
    source_mesh: DeviceMesh | None = None  # under a Partial source only
    destination_mesh: DeviceMesh | None = None  # the same
    held: dict[int, Box] = field(init=False)  # by rank; one box each, ranks with an empty shard left out
    needed: dict[int, Box] = field(init=False)

    def __post_init__(self) -> None:
        self.held = {r: boxes[0] for r, boxes in self.src.shards(self.shape).items() if boxes}
        self.needed = {r: boxes[0] for r, boxes in self.dst.shards(self.shape).items() if boxes}

    @cached_property
    def tiles(self) -> dict[Box, list[int]]:
        """Distinct source shards with their holders."""
        return by_box(self.held)

    @cached_property
    def wanted(self) -> dict[Box, list[int]]:
        """Distinct destination shards with the ranks that need them, ascending."""
        return by_box(self.needed)

    @cached_property
    def summed(self) -> Layout:
        """The source's layout once add_up has run."""
        if not self.src.has_partial:
            return self.src
        return Layout(
            mesh_ranks(self.src), [Replicate() if p.is_partial() else p for p in self.src.placements]
        )

    def add_up(self) -> None:
        """Replaces the pending values of a Partial source by their sums, as torch does: all_reduce."""
        if self.source is None or self.source_mesh is None:
            return
        for dim, placement in enumerate(self.src.placements):
            if placement.is_partial():
                dist.all_reduce(self.source, group=self.source_mesh.get_group(dim))

    def cut(self, box: Box) -> torch.Tensor:
        """A view of the local source."""
        assert self.source is not None
        return self.source[slices(box, self.held[dist.get_rank()])]

    def place(self, box: Box) -> torch.Tensor:
        """A view of the local destination."""
        assert self.destination is not None
        return self.destination[slices(box, self.needed[dist.get_rank()])]

    def put(self, box: Box, data: torch.Tensor) -> None:
        """Writes a box of the tensor into the local destination."""
        self.place(box).copy_(data.view(extents(box)))


@dataclass
class CaseBatch:
    """All tensors of a case on one rank."""

    moves: list[CaseMove]
    topology: Topology
    group: dist.ProcessGroup  # of all ranks of either mesh
    kept: dict[str, Any] = field(default_factory=dict)  # objects that a method makes in its first round

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


def mesh_ranks(layout: Layout) -> torch.Tensor:
    return torch.tensor(layout.ranks).view(layout.mesh_shape)


def by_box(boxes: dict[int, Box]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank in sorted(boxes):
        found.setdefault(boxes[rank], []).append(rank)
    return found


def slices(box: Box, base: Box) -> tuple[slice, ...]:
    """Returns the slices of `box` in a local tensor that holds `base`."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, base, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    box = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))
    return box if all(lo < hi for lo, hi in box) else None


def elements(box: Box) -> int:
    return prod(extents(box))


def cuts(box: Box, parts: int) -> list[Box]:
    """The box in at most `parts` pieces of nearly equal size, along its longest dimension."""
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    lo, hi = box[dim]
    parts = min(parts, hi - lo)
    edges = [lo + (hi - lo) * part // parts for part in range(parts + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1 :]) for a, b in pairwise(edges)]


def turns(holders: Sequence[int], receiver: int, turn: int) -> int:
    """Returns the rank that sends to `receiver` where holders take turns: itself if it holds the data."""
    return receiver if receiver in holders else holders[(receiver + turn) % len(holders)]


def applies(_: Case) -> str:
    return ""


def no_groups(_case: Case, _groups: Groups) -> None:
    return None


@dataclass(frozen=True)
class Method:
    """run: called by all ranks of either mesh, fills every move.destination. why_not: why it cannot do a
    case, or "". setup: called before by all ranks of the job, makes groups; run finds what it returns in
    batch.kept[name]. adds_up: it takes a Partial source; for others the source mesh adds up by all_reduce
    first, as part of the measured time. prepares: its first round does what later ones reuse (connections,
    plans, imports), so that its time means nothing."""

    name: str
    run: Callable[[CaseBatch], None]
    what: str  # for the table that explains the methods
    why_not: Callable[[Case], str] = applies
    setup: Callable[[Case, Groups], Any] = no_groups
    adds_up: bool = False
    often: bool = False  # repeated as often as was asked for; the others fewer times
    prepares: bool = True


BALANCES = ("none", "size", "search")  # of broadcast, next to the usual "greedy"
# Seconds; less than a session waits (benchmarks/reshard/session.py), so that the error names missing ranks.
LIMIT = 90.0


def reshard(batch: CaseBatch, strategy: str) -> None:
    """The call that a user makes: for one tensor, for one under Partial, and for many as one plan."""
    if any(move.source_mesh is not None for move in batch.moves):
        for move in batch.moves:
            _reshard_dtensor(batch, move, strategy)
    elif len(batch.moves) == 1:
        (move,) = batch.moves
        reshard_local(
            move.source, move.src, move.destination, move.dst, shape=move.shape, dtype=torch.int32,
            group=batch.group, strategy=strategy, topology=batch.topology, timeout=LIMIT,
        )  # fmt: skip
    else:
        _as_one_plan(batch, strategy, PlanOptions(strategy, batch.topology))


def _as_one_plan(batch: CaseBatch, name: str, options: PlanOptions) -> None:
    problems = [Problem(move.shape, torch.int32, move.summed, move.dst) for move in batch.moves]
    transfer = batch.keep(name, lambda: agreed_transfer(batch, problems, options))
    start(transfer, [move.source for move in batch.moves], [move.destination for move in batch.moves])


def agreed_transfer(batch: CaseBatch, problems: list[Problem], options: PlanOptions) -> PersistentTransfer:
    """A transfer that its ranks agree on at once, so that no measured round does."""
    transfer = PersistentTransfer(parent_group(batch.group, "reshard"), problems, "reshard", options)
    transfer.agree_ahead(LIMIT)
    return transfer


def start(
    transfer: PersistentTransfer, src: list[torch.Tensor | None], dst: list[torch.Tensor | None]
) -> None:
    transfer.start(src, dst, timeout=LIMIT).wait()


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=strides)


def _reshard_dtensor(batch: CaseBatch, move: CaseMove, strategy: str) -> None:
    assert move.source_mesh is not None and move.destination_mesh is not None
    sides: list[Any] = []
    for local, layout, mesh in (
        (move.source, move.src, move.source_mesh), (move.destination, move.dst, move.destination_mesh)
    ):  # fmt: skip
        if dist.get_rank() in layout.ranks:
            if local is None:  # an empty shard
                local = torch.empty(layout.local_shapes(move.shape)[dist.get_rank()], dtype=torch.int32)
            sides.append(_dtensor(local, mesh, layout.placements, move.shape))
        else:
            sides.append(TensorSpec(move.shape, torch.int32, mesh, layout.placements))
    x, out = sides
    reshard_(out, x, group=batch.group, strategy=strategy, topology=batch.topology, timeout=LIMIT)


def balanced(batch: CaseBatch, name: str, balance: str) -> None:
    _as_one_plan(batch, name, PlanOptions("broadcast", batch.topology, balance))


def backend_broadcast(batch: CaseBatch) -> None:
    """torch.distributed.broadcast of a tensor on a group whose backend is meshcast."""
    (move,) = batch.moves
    root = move.src.ranks[0]
    data = move.destination if move.destination is not None else move.source
    assert data is not None
    if dist.get_rank() == root and move.destination is not None and move.source is not None:
        data.copy_(move.source)
    dist.broadcast(data, root, batch.kept["backend broadcast"])


def _only_from_one(case: Case) -> str:
    whole = all(all(p == "Replicate()" for p in tensor.dst.placement_texts) for tensor in case.tensors)
    if len(case.tensors) == 1 and len(case.src.ranks) == 1 and whole:
        return ""
    return "a broadcast goes from one rank to replicas"


def _meshcast_group(case: Case, groups: Groups) -> dist.ProcessGroup:
    return groups.new(case.ranks, "meshcast")


OUR_METHODS = [
    *(
        Method(
            strategy, partial(reshard, strategy=strategy), "meshcast's strategy of this name", adds_up=True,
            often=strategy in ("auto", "multicast", "broadcast"),
        )
        for strategy in STRATEGIES
    ),
    *(
        Method(
            f"broadcast-{balance}", partial(balanced, name=f"broadcast-{balance}", balance=balance),
            f'the paper\'s broadcast with balance "{balance}"; plain `broadcast` is "greedy"',
        )
        for balance in BALANCES
    ),
    Method(
        "backend broadcast", backend_broadcast,
        "`torch.distributed.broadcast` on a group of backend meshcast",
        _only_from_one, _meshcast_group,
    ),
]  # fmt: skip


class Message(NamedTuple):
    """A box that goes from one rank to others. placed: the sender has it in its destination already."""

    move: int  # index
    box: Box
    sender: int
    receivers: list[int]
    placed: bool = False


def _boxes(move: CaseMove) -> Iterator[tuple[Box, list[int], list[int]]]:
    """Every intersection of a source tile with a destination tile: box, holders, ranks that need it."""
    for tile, holders in move.tiles.items():
        for wanted, receivers in move.wanted.items():
            box = intersection(tile, wanted)
            if box is not None:
                yield box, holders, receivers


def planned_unicasts(index: int, move: CaseMove) -> list[list[Message]]:
    """Megatron-LM: each receiver gets its own copy, holders take turns."""
    return [
        [
            Message(index, box, turns(holders, receiver, turn), [receiver])
            for turn, (box, holders, receivers) in enumerate(_boxes(move))
            for receiver in receivers
        ]
    ]


def planned_stripes(index: int, move: CaseMove) -> list[list[Message]]:
    """NeMo-RL: each replica gets a stripe, holders taking turns; then each passes its stripe on to the
    others."""
    first, second = [], []
    for box, holders, receivers in _boxes(move):
        for part, (stripe, receiver) in enumerate(zip(cuts(box, len(receivers)), receivers, strict=False)):
            sender = receiver if receiver in holders else holders[part % len(holders)]
            first.append(Message(index, stripe, sender, [receiver]))
            others = [rank for rank in receivers if rank != receiver]
            if others:
                second.append(Message(index, stripe, receiver, others, placed=True))
    return [first, second]


def leader_ring(index: int, move: CaseMove) -> list[list[Message]]:
    """NCCL M2N: holders take turns as the one that sends a box; the first receiver on each host passes it
    on to the next host, and to the ranks of its own. Here it travels as a chain, which the last receiver on
    each host carries on: the hosts exchange the same bytes."""
    messages = []
    for turn, (box, holders, receivers) in enumerate(_boxes(move)):
        messages += [Message(index, box, rank, [rank]) for rank in receivers if rank in holders]
        others = [rank for rank in receivers if rank not in holders]
        if others:
            messages.append(Message(index, box, holders[turn % len(holders)], others))
    return [messages]


class _Phase:
    """Messages that travel together: a transfer, and this rank's end of each of its tensors."""

    def __init__(self, batch: CaseBatch, messages: list[Message], strategy: str, balance: str) -> None:
        rank = dist.get_rank()
        self.src: list[torch.Tensor | None] = []
        self.dst: list[torch.Tensor | None] = []
        problems: list[Problem] = []
        for message in messages:
            move = batch.moves[message.move]
            src = Layout([message.sender], [Replicate()])
            dst = Layout(message.receivers, [Replicate()])
            problems.append(Problem(extents(message.box), move.dtype, src, dst))
            read = move.place if message.placed else move.cut
            self.src.append(read(message.box) if rank == message.sender else None)
            self.dst.append(move.place(message.box) if rank in message.receivers else None)
        self._transfer: PersistentTransfer | None = None
        if any(tensor is not None for tensor in (*self.src, *self.dst)):
            self._transfer = agreed_transfer(batch, problems, PlanOptions(strategy, batch.topology, balance))

    def run(self) -> None:
        if self._transfer is not None:
            start(self._transfer, self.src, self.dst)


Plan = Callable[[int, CaseMove], list[list[Message]]]


def _run(batch: CaseBatch, name: str, plan: Plan, strategy: str) -> None:
    for phase in batch.keep(name, lambda: _phases(batch, plan, strategy)):
        phase.run()


def _phases(batch: CaseBatch, plan: Plan, strategy: str) -> list[_Phase]:
    plans = [plan(index, move) for index, move in enumerate(batch.moves)]
    joined = [[message for phase in phases for message in phase] for phases in zip(*plans, strict=True)]
    return [_Phase(batch, messages, strategy, "none") for messages in joined if messages]


def _method(name: str, plan: Plan, strategy: str, what: str) -> Method:
    return Method(name, lambda batch: _run(batch, name, plan, strategy), what)


PUBLISHED_METHODS = [
    _method("Megatron plan", planned_unicasts, "send_recv",
            "Megatron-LM's plan, one copy per receiver and holders in turn, on meshcast's transport"),
    _method("NeMo-RL plan", planned_stripes, "broadcast",
            "NeMo-RL's plan, a stripe per replica and then all to all replicas, on meshcast's transport"),
    _method("M2N plan", leader_ring, "broadcast",
            "NCCL M2N's plan, a ring of one leader per host, on meshcast's transport"),
]  # fmt: skip


class _Unicasts:
    """Messages between pairs of ranks, posted in one order on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank()
        self._works: list[dist.Work | None] = []
        self._arrivals: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []

    def add(
        self, sender: int, receiver: int, data: Callable[[], torch.Tensor], count: int,
        place: Callable[[torch.Tensor], None],
    ) -> None:  # fmt: skip
        if sender == receiver:
            if self._rank == sender:
                place(data().reshape(-1))
        elif self._rank == sender:
            self._works.append(dist.isend(data().contiguous(), receiver, self._group))
        elif self._rank == receiver:
            buffer = torch.empty(count, dtype=torch.int32)
            self._works.append(dist.irecv(buffer, sender, self._group))
            self._arrivals.append((place, buffer))

    def wait(self) -> None:
        for work in self._works:
            assert work is not None  # this rank is in the group
            work.wait()
        for place, buffer in self._arrivals:
            place(buffer)


def unicasts(batch: CaseBatch) -> None:
    """One message for each box and receiver; senders take turns among the holders, as Megatron-LM's
    resharding does."""
    messages = _Unicasts(batch.group)
    for move in batch.moves:
        for receiver, wanted in move.needed.items():
            for turn, (tile, holders) in enumerate(move.tiles.items()):
                box = intersection(tile, wanted)
                if box is not None:
                    messages.add(
                        turns(holders, receiver, turn), receiver, partial(move.cut, box), elements(box),
                        partial(move.put, box),
                    )  # fmt: skip
    messages.wait()


def stripes(batch: CaseBatch) -> None:
    """Replicas of the destination receive a different stripe of every box each, then gather the others from
    each other: the plan of NeMo-RL's fallback. The collective is torch's all_gather."""
    rank, messages = dist.get_rank(), _Unicasts(batch.group)
    gathered: list[tuple[CaseMove, Box, torch.Tensor]] = []  # box, padded stripe of this rank
    for move in batch.moves:
        for wanted, receivers in move.wanted.items():
            for tile, holders in move.tiles.items():
                box = intersection(tile, wanted)
                if box is None:
                    continue
                part = -(-elements(box) // len(receivers))
                own = torch.zeros(part, dtype=torch.int32) if rank in receivers else None
                for index, receiver in enumerate(receivers):
                    count = min(part, elements(box) - index * part)
                    if count <= 0:
                        continue
                    sender = receiver if receiver in holders else holders[index % len(holders)]
                    messages.add(
                        sender, receiver, partial(_stripe, move, box, index * part, count), count,
                        partial(_fill, own, count),
                    )  # fmt: skip
                if own is not None:
                    gathered.append((move, box, own))
    messages.wait()
    for move, box, own in gathered:
        group = move.replicas[move.needed[rank]]
        parts = [own]
        if group is not None:
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group)
        move.put(box, torch.cat(parts)[: elements(box)])


def broadcasts(batch: CaseBatch) -> None:
    """Every tile is broadcast from its first holder to all ranks, which keep what they need: what a script
    does that cannot work out who needs what."""
    rank = dist.get_rank()
    for move in batch.moves:
        for tile, holders in move.tiles.items():
            held = move.held.get(rank) == tile
            if rank == holders[0] and move.source is not None:
                buffer = move.source.contiguous()
            else:  # a collective fills it on every rank, also where the tile is held
                buffer = torch.empty(extents(tile), dtype=torch.int32)
            dist.broadcast(buffer, holders[0], batch.group)
            data = move.source if held and move.source is not None else buffer
            box = intersection(tile, move.needed[rank]) if rank in move.needed else None
            if box is not None:
                move.put(box, data[slices(box, tile)].reshape(-1))


def gather_broadcast(batch: CaseBatch) -> None:
    """The whole tensor on one rank of the source mesh, a broadcast of all of it to the destination mesh, and
    each rank cuts out its shard: full_tensor() and broadcast, as most scripts that move weights do."""
    rank = dist.get_rank()
    for move, feeders in zip(batch.moves, batch.kept[GATHER_BROADCAST], strict=True):
        root = _root(move)
        whole = torch.empty(move.shape, dtype=torch.int32) if rank in (root, *move.needed) else None
        messages = _Unicasts(batch.group)
        for tile, holders in move.tiles.items():
            sender = root if root in holders else holders[0]
            messages.add(sender, root, partial(move.cut, tile), elements(tile), partial(_insert, whole, tile))
        messages.wait()
        if whole is not None:
            dist.broadcast(whole, root, feeders)
            if rank in move.needed:
                box = move.needed[rank]
                move.place(box).copy_(whole[tuple(slice(lo, hi) for lo, hi in box)])


GATHER_BROADCAST = "gloo gather+broadcast"


def _feeders(case: Case, groups: Groups) -> list[dist.ProcessGroup]:
    """For each tensor, the group of its root and its destination ranks; equal ones shared."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found = []
    for tensor in case.tensors:
        move = CaseMove(*tensor)
        ranks = tuple(sorted({_root(move), *move.needed}))
        if ranks not in made:
            made[ranks] = groups.new(ranks)
        found.append(made[ranks])
    return found


def _root(move: CaseMove) -> int:
    return next(iter(move.tiles.values()))[0]


def _insert(whole: torch.Tensor | None, tile: Box, data: torch.Tensor) -> None:
    assert whole is not None
    whole[tuple(slice(lo, hi) for lo, hi in tile)] = data.view(extents(tile))


def _stripe(move: CaseMove, box: Box, first: int, count: int) -> torch.Tensor:
    return move.cut(box).reshape(-1)[first : first + count]


def _fill(own: torch.Tensor | None, count: int, data: torch.Tensor) -> None:
    assert own is not None
    own[:count] = data


GLOO_METHODS = [
    Method("gloo unicasts", unicasts,
           "one isend per box and receiver, senders in turn: what Megatron-LM's resharding does over gloo",
           prepares=False),
    Method("gloo stripes", stripes,
           "replicas receive a stripe each, then all_gather: NeMo-RL's fallback", prepares=False),
    Method("gloo broadcasts", broadcasts, "every source shard is broadcast to everybody", prepares=False),
    Method(GATHER_BROADCAST, gather_broadcast,
           "the whole tensor is gathered on one rank and broadcast to the destination mesh",
           setup=_feeders, prepares=False),
]  # fmt: skip


_NAME = "DTensor parent mesh"


def redistribute(batch: CaseBatch) -> None:
    for move, mesh in zip(batch.moves, batch.kept[_NAME], strict=True):
        rank = dist.get_rank()
        if rank not in (*move.src.ranks, *move.dst.ranks):
            continue
        before, after = list(move.src.placements), list(move.dst.placements)
        local = move.source
        if local is None:
            twin = move.src.ranks[(move.src if rank in move.src.ranks else move.dst).ranks.index(rank)]
            local = torch.zeros(move.src.local_shapes(move.shape)[twin], dtype=torch.int32)
        if mesh.ndim > len(before):
            before, after = [Partial("sum"), *before], [Replicate(), *after]
        y = _dtensor(local, mesh, before, move.shape).redistribute(mesh, after).to_local()
        if move.destination is not None:
            move.destination.copy_(y)


def _cannot(case: Case) -> str:
    return next((why for tensor in case.tensors if (why := _cannot_move(tensor))), "")


def _cannot_move(tensor: Tensor) -> str:
    src, dst = tensor.src, tensor.dst
    if src.mesh_shape != dst.mesh_shape:
        return "needs meshes of one shape"
    if src.ranks != dst.ranks and set(src.ranks) & set(dst.ranks):
        return "needs disjoint or identical meshes"
    if not (_ascends(src) and _ascends(dst)):
        return "needs ranks in ascending order: torch sorts those of a group"
    return ""


def _ascends(layout: Layout) -> bool:
    mesh = mesh_ranks(layout)
    return all(bool((mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.ndim))


def _meshes(case: Case, groups: Groups) -> list[DeviceMesh]:
    """The parent mesh of each tensor, equal ones shared."""
    made: dict[object, DeviceMesh] = {}
    found = []
    for tensor in case.tensors:
        key = (tensor.src.ranks, tensor.dst.ranks, tensor.src.mesh_shape)
        if key not in made:
            made[key] = groups.mesh_of(*(tensor.src, tensor.dst)[: 1 if key[0] == key[1] else 2])
        found.append(made[key])
    return found


DTENSOR_METHODS = [
    Method(
        _NAME, redistribute,
        "DTensor.redistribute over a mesh that holds both, Partial across them; only for meshes of one shape",
        _cannot, _meshes, adds_up=True,
    )
]  # fmt: skip


_ALL = (*OUR_METHODS, *PUBLISHED_METHODS, *GLOO_METHODS, *DTENSOR_METHODS)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
