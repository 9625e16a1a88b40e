"""Replicas: copies of a training state in the memory of other hosts, made again every few steps.

Each rank keeps copies of boxes for others, on another host than all ranks that hold the box. It has two
copies of its own state, one that is whole and one that is being made.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..base import checks
from ..base.boxes import extents, piece_view
from ..base.settings import host_identity
from ..base.values import carried, is_carried, restored
from ..base.wire import pack, unpack
from ..errors import Caller, LayoutError, PlanMismatchError
from ..groups.parent import parent_group, seconds
from ..layout import Box, Layout
from ..resharding.meshes import Gone
from ..resharding.state_arguments import Current, Given, State, checked_call
from ..resharding.state_entries import OP as MOVE
from ..resharding.state_entries import Held, Sides, StateSide, local_of, memory_with, same_memory, with_boxes
from ..resharding.state_run import (
    Conversation,
    Memory,
    Repeated,
    ReshardedState,
    StateRun,
    conversation,
    likeness,
    started,
)
from ..transfers.handle import Handle
from .places import Inventory, Old, called_by, old_layouts, run

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = ["Copy", "Keepers", "ReplicaCopies", "Replicas"]


class _Tile(NamedTuple):
    name: str
    box: Box
    holders: tuple[int, ...]
    nbytes: int


class Keepers:
    """The ranks that keep copies for others, chosen the same way on all ranks. keeper: {(name, box): rank},
    of boxes that live on one host alone.

    Where all ranks are on one host, a rank counts as a host. What the same ranks hold goes to one keeper, so
    that few pairs of ranks talk. Keepers are chosen so that each keeps about as many bytes.
    """

    def __init__(self, origins: Mapping[str, Held], host_of: Mapping[int, Hashable]) -> None:
        """host_of: of each rank of the group."""
        self._origins = origins
        hosts = host_of if len(set(host_of.values())) > 1 else {rank: rank for rank in host_of}
        parts: dict[tuple[int, ...], list[_Tile]] = {}
        for tile in self._tiles():
            if len({hosts[rank] for rank in tile.holders}) == 1:
                parts.setdefault(tile.holders, []).append(tile)
        sizes = {holders: sum(tile.nbytes for tile in tiles) for holders, tiles in parts.items()}
        kept = dict.fromkeys(sorted(hosts), 0)
        place = {rank: index for index, rank in enumerate(kept)}
        self.keeper: dict[tuple[str, Box], int] = {}
        for holders in sorted(parts, key=lambda each: (-sizes[each], each)):
            first = holders[0]
            others = [rank for rank in kept if hosts[rank] != hosts[first]]
            # Of those that keep as little, the next one: else the last hosts would be left without.
            keeper = min(others, key=lambda rank: (kept[rank], (place[rank] - place[first]) % len(place)))
            kept[keeper] += sizes[holders]
            self.keeper |= {(tile.name, tile.box): keeper for tile in parts[holders]}

    def _tiles(self) -> Iterator[_Tile]:
        for name, origin in self._origins.items():
            for box, holders in origin.where._core(origin.shape).tiles(origin.shape):
                count = math.prod(extents(box))
                if count:
                    yield _Tile(name, box, tuple(sorted(holders)), count * origin.dtype.itemsize)

    def destinations(self) -> dict[str, Layout]:
        """Returns what each keeper receives, by the name of the tensor."""
        boxes: dict[str, dict[int, list[Box]]] = {}
        for (name, box), rank in self.keeper.items():
            boxes.setdefault(name, {}).setdefault(rank, []).append(box)
        return {name: Layout.from_boxes(each) for name, each in boxes.items()}

    def gone(self, lost: Collection[int]) -> list[Gone]:
        """Returns the boxes that live nowhere without these ranks: neither on holders nor on a keeper."""
        found = []
        for tile in self._tiles():
            had = [*tile.holders, *self._keepers(tile)]
            if all(rank in lost for rank in had):
                found.append(Gone(tile.name, tile.box, tuple(sorted(had))))
        return found

    def _keepers(self, tile: _Tile) -> list[int]:
        keeper = self.keeper.get((tile.name, tile.box))
        return [] if keeper is None else [keeper]

    def in_place_of(self, lost: Collection[int]) -> dict[str, dict[int, list[Box]]]:
        """Returns the boxes that living keepers give where all holders are lost, by name and rank."""
        found: dict[str, dict[int, list[Box]]] = {}
        for tile in self._tiles():
            if all(rank in lost for rank in tile.holders):
                for keeper in self._keepers(tile):
                    if keeper not in lost:
                        found.setdefault(tile.name, {}).setdefault(keeper, []).append(tile.box)
        return found

    def layout(self, name: str, more: Mapping[int, list[Box]]) -> Layout:
        """Returns the layout of a tensor, with the boxes of keepers."""
        origin = self._origins[name]
        return with_boxes(origin.where, origin.shape, more, name) if more else origin.where


class Copy:
    """A copy of one step. own: what this rank held; replicas: what it keeps for others, by name as local
    tensors; values: entries that are no tensors, of all ranks. All in host memory. step: None while it is not
    whole."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.own: dict[str, torch.Tensor] = {}
        self.replicas: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.memory = Memory()  # that the replicas arrive in

    @torch.no_grad()
    def take(
        self,
        tensors: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        ties: Mapping[str, str],
    ) -> None:
        """Copies local tensors; returns once they may be changed again. shapes: as layouts say them, which
        torch does not always for empty shards. ties: {name: an earlier name} of tensors that are one."""
        sources, targets = [], []
        for name, tensor in tensors.items():
            if name in ties:
                self.own[name] = self.own[ties[name]]
                continue
            if name not in self.own:
                self.own[name] = torch.empty(shapes[name], dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            if tensor.numel():
                sources.append(tensor.reshape(shapes[name]))
                targets.append(self.own[name])
        if targets:
            torch._foreach_copy_(targets, sources)


class ReplicaCopies:
    """Any thread."""

    def __init__(self) -> None:
        self._both = (Copy(), Copy())
        self._lock = threading.Lock()

    def older(self) -> Copy:
        """Returns the copy to be written next, which is not whole from now on. To be called only once all
        ranks know that all have the newer one."""
        with self._lock:
            found = min(self._both, key=lambda copy: -1 if copy.step is None else copy.step)
            found.step = None
            return found

    def whole(self, copy: Copy, step: int, replicas: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Everything of it is here."""
        with self._lock:
            copy.step, copy.replicas, copy.values = step, replicas, values

    @property
    def steps(self) -> list[int]:
        """The steps whose copies are whole here, ascending."""
        with self._lock:
            return sorted(copy.step for copy in self._both if copy.step is not None)

    def of(self, step: int) -> Copy:
        return next(copy for copy in self._both if copy.step == step)


_OP = "Replicas"
_ALWAYS = "meshcast.Replicas"  # an entry that all ranks have, so that no state is empty
_LARGEST = (1 << 62) - 1  # step
_SETTLE = 5.0  # seconds that a refresh in flight gets when its copies are requested


class _Member(NamedTuple):
    """The facts that a rank reports when Replicas are made. side: of its state; host: that it runs on."""

    side: StateSide
    host: str | int


class Replicas:
    """Copies of a training state, so that a job whose ranks die continues without a checkpoint.

    A collective of all ranks of `group`, as `step` and `refresh` are. Every `every` steps each rank copies
    what it holds to host memory, which the training step waits for. In the background, what lives on one host
    alone is then sent to a rank of another host: any one host may die. Where all ranks are on one host, it
    goes to another rank, and any one rank may die. Connections are its own, and no order with other calls of
    the group is needed.

    Each rank has two copies of what it holds, and two of what it keeps for others. One of them is whole at
    any time: a refresh that a death interrupts leaves the one before. ``remesh(..., replicas=...)`` takes the
    newest that is whole on all ranks that live.

    Args:
        state: {name: entry} as for `remesh`, a module, or a function that returns a mapping, called at every
            copy; as for `WeightSync`. Its names, shapes, dtypes and layouts stay: the moments of an optimizer
            have to be there, as they are after its first step. Tensors on a GPU are copied to pinned host
            memory.
        every: steps from one copy to the next.
        old: layouts of plain tensors that are shards, as for `remesh`.
        own: entries of which each rank has its own, as for `remesh`. No copies are made of tensors among
            them: what another rank has will do.
        topology: whose hosts count. None: the hosts that the ranks run on.
        timeout: of the constructor, and of each refresh.

    Raises:
        LayoutError, PlanMismatchError: a wrong argument, entries that cannot travel, or ranks that describe
            them differently; on all ranks.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        from meshcast import elastic

        rank, then = dist.get_rank(), DeviceMesh("cpu", [0, 1, 2, 3])
        w = distribute_tensor(torch.zeros(8), then, [Shard(0)])
        replicas = elastic.Replicas({"w": w}, every=2)
        for number in range(1, 6):
            w.add_(1)  # a step of the optimizer
            replicas.step(number)
        now = DeviceMesh("cpu", [0, 1, 2])  # rank 3 is lost
        if rank != 3:
            state = elastic.remesh(None, None, lambda _: (now, [Shard(0)]), [3], replicas=replicas)
            assert state.version == 4  # one step is lost
            assert state["w"].full_tensor().tolist() == [4.0] * 8
    """

    def __init__(
        self,
        state: State,
        every: int,
        *,
        old: Old = None,
        own: Iterable[str] | Callable[[str], bool] = (),
        group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        parent = parent_group(group, _OP)
        self._parent, self._rank = parent, parent.rank
        self._name = f"{_OP} {next(parent.extras.setdefault(_OP, itertools.count()))}"
        self._twin = parent.twin(self._name)
        self._copies = ReplicaCopies()
        self._handle: Handle[ReshardedState] = Handle(None, ReshardedState(), lambda: 0.0)  # of nothing
        self._limit = parent.timeout
        given: Given | Exception
        try:
            self._limit = seconds(timeout, parent.timeout)
            self.every = checks.integer("every", every, 1, _LARGEST)
            if len(parent.ranks) < 2:
                raise LayoutError("the group has one rank; a copy needs another")
            self._state = Current(f"{_OP}: state", state)
            held = self._state.look()
            if not isinstance(held, Mapping):
                raise LayoutError("state: a WeightSource has no copies; give its tensors as a mapping")
            layouts = old_layouts(held, old, self._rank)
            call = checked_call(self._rank, Given(held, {}, layouts=layouts, own=own))
            host = host_identity() if topology is None else topology._host_of(self._rank)
            same = {"every": self.every, "topology": None if topology is None else topology.to_json()}
            given = Given({f"rank {self._rank}": pack(_Member(call.side, host)), **same}, None)
        except Exception as error:
            given = Caller(_OP, self._rank).typed(error)
        with called_by(_OP, self._rank):
            received = run(parent, conversation(self._twin), time.monotonic() + self._limit, given)
            known: dict[Any, Any] = {}
            members = {r: unpack(_Member, received[f"rank {r}"], known) for r in sorted(parent.ranks)}
            sides = Sides({rank: each.side for rank, each in members.items()})
            names = {name for side in sides.sides.values() for name in side.held}
            self._origins = {name: sides.held(name) for name in sorted(names)}
            self._check_partial()
        self._own = sides.own
        shared = {name: origin for name, origin in self._origins.items() if name not in sides.own}
        self._keepers = Keepers(shared, {rank: each.host for rank, each in members.items()})
        self._kept = self._keepers.destinations()
        tensors = self._tensors(held)
        self._like = _likenesses(tensors)
        self._shapes = {name: self._shape(name, tensor) for name, tensor in tensors.items()}
        self._calls = Repeated(
            self._rank,
            Given(
                None,
                {name: layout for name, layout in self._kept.items() if self._rank in layout.ranks},
                layouts={name: self._place(name) for name in self._kept if name in tensors},
                own=own,
                topology=topology,
            ),
        )

    def __repr__(self) -> str:
        return f"<{self._name} of group {self._parent.name!r}, every {self.every} steps>"

    def step(self, number: int) -> None:
        """Call it after every step of the optimizer, with the number of steps done. Every `every` steps it is
        a `refresh`."""
        with Caller(f"{_OP}.step", self._rank):
            number = checks.integer("number", number, 0, _LARGEST)
        if number % self.every == 0:
            self.refresh(number)

    def refresh(self, number: int) -> None:
        """Copies the state as it is now, and returns while the copies travel. It first waits for the refresh
        before.

        number: of steps done; it rises from call to call, and all ranks give the same.

        Raises the error of the refresh before, if that failed: as reshard_state_dict, and LayoutError for a
        state of other names, shapes, dtypes or layouts than at first. After an error there are no further
        copies, and the last whole one stays."""
        self.wait()
        try:
            number = checks.integer("number", number, 0, _LARGEST)
            held = self._state.look()
            tensors = self._tensors(held)
            like = _likenesses(tensors)
            if like != self._like:
                raise self._another(like)
            copy = self._copies.older()
            shards = {name: local_of(tensor) for name, tensor in tensors.items()}
            copy.take(shards, self._shapes, same_memory(tensors.items()))
        except Exception as raised:
            error = Caller(_OP, self._rank).typed(raised)
            self._handle = started(
                self._twin, StateRun(self._rank, Given(None, None), wrong=error), self._limit
            )
            raise error from None
        # A copy of each: the state's own may change before this step is requested.
        values = {name: restored(carried(value)) for name, value in held.items() if is_carried(value)}
        moved = {name: copy.own[name] for name in self._kept if name in copy.own}
        refresh = self._calls.prepared({**moved, **values, _ALWAYS: None}, None, number, copy.memory)

        def refreshed(conversation: Conversation, deadline: float) -> None:
            try:
                result = conversation.run(refresh, deadline)
                replicas = {name: x for name, x in result.items() if isinstance(x, torch.Tensor)}
                received = {name: x for name, x in result.items() if name not in replicas and name != _ALWAYS}
                self._copies.whole(copy, number, replicas, {**received, **values})
                # The copy before is written again next. By then every rank knows that all have this one: a
                # rank that does not know has both.
                conversation.rows.gather([number], max(deadline - time.monotonic(), 1e-3))
            except (LayoutError, PlanMismatchError):  # all ranks have it
                raise
            except BaseException as error:
                conversation.parent.abort(f"rank {self._rank} gave up a refresh: {error}")
                raise

        self._handle = started(self._twin, refresh, self._limit, refreshed)

    def wait(self) -> None:
        """Returns once the last refresh has ended, and the copies of its step are whole on all ranks. Raises
        as the next `refresh` would."""
        with called_by(_OP, self._rank):
            self._handle.wait()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose copies are whole on this rank, one or two; empty before the first refresh has ended."""
        return tuple(self._copies.steps)

    def close(self) -> None:
        """Ends its connections. The copies that are whole stay, for `remesh`."""
        self._settle(time.monotonic() + _SETTLE)
        self._parent.drop_twin(self._name, time.monotonic() + _SETTLE)  # others may still read from this rank

    # The functions that remesh calls.

    def _offer(self, lost: Collection[int], deadline: float) -> Inventory:
        """Describes the job without the lost ranks."""
        self._settle(deadline)
        more = self._keepers.in_place_of(lost)
        held = {rank for origin in self._origins.values() for rank in origin.where.ranks}
        return Inventory(
            held=[n for n in self._origins if n in self._shapes or self._rank in more.get(n, {})],
            steps=self._copies.steps,
            gone=self._keepers.gone(lost),
            idle=[rank for rank in lost if rank not in held],
        )

    def _taken(self, step: int, lost: Collection[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of a step as this rank has it, with what it keeps for ranks that are lost, and `layouts`
        of it."""
        copy = self._copies.of(step)
        more = self._keepers.in_place_of(lost)
        state: dict[str, Any] = dict(copy.values)
        layouts: dict[str, Any] = {}
        for name, origin in self._origins.items():
            boxes = more.get(name, {})
            mine = boxes.get(self._rank, [])
            own = copy.own.get(name)
            if own is None and not mine:
                continue
            if mine:
                held = self._kept[name].pieces(origin.shape)[self._rank]
                kept = {piece[0]: piece_view(copy.replicas[name], piece) for piece in held[1]}
                own = memory_with(own, [kept[box] for box in mine])
            state[name] = own
            if name not in self._own:
                layouts[name] = (self._keepers.layout(name, boxes), origin.shape)
        return state, layouts

    def _settle(self, deadline: float) -> None:
        """Waits for a refresh in flight, and ends it where that takes long."""
        soon = min(time.monotonic() + _SETTLE, deadline)
        for until in (soon, soon + _SETTLE):
            while not self._handle.is_completed() and time.monotonic() < until:
                time.sleep(0.01)
            if not self._handle.is_completed():
                self._twin.twin(MOVE).abort(f"rank {self._rank} takes what is whole of its {_OP}")

    def _tensors(self, held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the tensors of which this rank has a part."""
        return {
            name: value
            for name, value in held.items()
            if isinstance(value, torch.Tensor)
            and (name in self._own or name not in self._origins or self._rank in self._place(name)[0].ranks)
        }

    def _shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        if name in self._own:
            return tuple(tensor.shape)
        layout, shape = self._place(name)
        return layout.local_shapes(shape)[self._rank]

    def _place(self, name: str) -> tuple[Any, tuple[int, ...]]:
        origin = self._origins[name]
        return origin.where, origin.shape

    def _check_partial(self) -> None:
        for name, origin in self._origins.items():
            if origin.where.has_partial:
                raise LayoutError(f"{name!r} under {origin.where} holds Partial; reduce it first")

    def _another(self, like: Mapping[str, Any]) -> LayoutError:
        unlike = sorted(name for name in {*like, *self._like} if like.get(name) != self._like.get(name))
        return LayoutError(
            f"the state has other tensors than at first: {unlike[0]!r} is {like.get(unlike[0])}, was "
            f"{self._like.get(unlike[0])}; make new Replicas for another state"
        )


def _likenesses(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Equal for states that are copied the same way: also in what is one tensor under several names."""
    ties = same_memory(tensors.items())
    return {name: (likeness(tensor), ties.get(name)) for name, tensor in tensors.items()}
