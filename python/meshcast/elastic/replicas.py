"""Replicas: copies of a training state in the memory of other hosts, made anew every few steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..base import checks
from ..base.host import host_identity
from ..errors import LayoutError, MeshcastError, PlanMismatchError, typed
from ..groups.parent import parent_group, seconds
from ..resharding.state_again import Repeated, likeness
from ..resharding.state_arguments import Given, checked_call
from ..resharding.state_background import started
from ..resharding.state_current import Current, State
from ..resharding.state_entries import local_of, same_memory
from ..resharding.state_kept import Known
from ..resharding.state_loaded import memory_with
from ..resharding.state_results import ReshardedState
from ..resharding.state_run import Conversation, Prepared, conversation
from ..resharding.state_sources import Said
from ..resharding.state_specs import OP as MOVE
from ..resharding.state_specs import decode
from ..resharding.state_values import carried, is_carried, restored
from ..transfers.handle import Handle
from ..transfers.transfer import Call
from .copies import Copies, Copy
from .guests import Guests, box_views
from .places import Old, old_layouts
from .telling import call_by, run

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..topology import Topology

__all__ = ["Replicas"]

_OP = "Replicas"
_ALWAYS = "meshcast.Replicas"  # an entry that all ranks have, so that there is something to tell
_LARGEST = (1 << 62) - 1  # step
_SETTLE = 5.0  # seconds that a refresh on its way gets when its copies are asked for


class Replicas:
    """Copies of a training state, so that a job whose ranks die goes on without a checkpoint.

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
            them unlike each other; on all ranks.

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
        self._copies = Copies()
        self._handle: Handle[ReshardedState] = Handle(None, ReshardedState(), lambda: 0.0)  # of nothing
        self._limit = parent.timeout
        said: Given | Exception
        try:
            self._limit = seconds(timeout, parent.timeout)
            self.every = checks.integer(f"{_OP}: every", every, 1, _LARGEST)
            if len(parent.ranks) < 2:
                raise LayoutError(f"{_OP}: the group has one rank; a copy needs another")
            self._state = Current(f"{_OP}: state", state)
            held = self._state.look()
            layouts = old_layouts(held, old, self._rank)
            call = checked_call(self._rank, Given(held, {}, layouts=layouts, own=own))
            host = host_identity() if topology is None else topology._host_of(self._rank)
            about = {"every": self.every, "topology": None if topology is None else topology.to_json()}
            said = Given({f"rank {self._rank}": {"text": call.text(), "host": host}, **about}, None)
        except Exception as error:
            said = typed(error, _OP, self._rank)
        try:
            told = run(parent, conversation(self._twin), time.monotonic() + self._limit, said)
            ranks = sorted(parent.ranks)
            known: dict[Any, Any] = {}
            sides = Said({rank: decode(told[f"rank {rank}"]["text"], known) for rank in ranks}, self._rank)
            names = {name for side in sides.sides.values() for name in side.held}
            self._origins = {name: sides.origin(name) for name in sorted(names)}
            self._check_partial()
        except MeshcastError as error:
            call_by(_OP, error)
            raise
        self._own = sides.own
        shared = {name: origin for name, origin in self._origins.items() if name not in sides.own}
        self._guests = Guests(shared, {rank: told[f"rank {rank}"]["host"] for rank in ranks})
        self._kept = self._guests.destinations()
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

    def step(self, number: int) -> None:
        """Call it after every step of the optimizer, with the number of steps done. Every `every` steps it is
        a `refresh`."""
        if checks.integer(f"{_OP}.step", number, 0, _LARGEST) % self.every == 0:
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
            number = checks.integer(f"{_OP}.refresh", number, 0, _LARGEST)
            held = self._state.look()
            tensors = self._tensors(held)
            like = _likenesses(tensors)
            if like != self._like:
                raise self._another(like)
            copy = self._copies.older()
            shards = {name: local_of(tensor) for name, tensor in tensors.items()}
            copy.take(shards, self._shapes, same_memory(tensors.items()))
        except Exception as raised:
            error = typed(raised, _OP, self._rank)
            self._handle = started(
                self._twin, Prepared(self._rank, Given(None, None), None, wrong=error), self._limit
            )
            raise error from None
        # A copy of each: the state's own may change before anybody asks for this step.
        values = {name: restored(carried(value)) for name, value in held.items() if is_carried(value)}
        moved = {name: copy.own[name] for name in self._kept if name in copy.own}
        prepared = self._calls.prepared({**moved, **values, _ALWAYS: None}, None, number, copy.memory)

        def refreshed(
            talk: Conversation, deadline: float, result: ReshardedState
        ) -> tuple[Known, list[Call]]:
            return self._refreshed(talk, deadline, result, prepared, copy, number, values)

        self._handle = started(self._twin, prepared, self._limit, refreshed)

    def wait(self) -> None:
        """Returns once the last refresh has ended, and the copies of its step are whole on all ranks. Raises
        as the next `refresh` would."""
        try:
            self._handle.wait()
        except MeshcastError as error:
            call_by(_OP, error)
            raise

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose copies are whole on this rank, one or two; empty before the first refresh has ended."""
        return tuple(self._copies.steps)

    def close(self) -> None:
        """Ends its connections. The copies that are whole stay, for `remesh`."""
        self._settle(time.monotonic() + _SETTLE)
        self._parent.drop_twin(self._name, time.monotonic() + _SETTLE)  # others may still read from this rank

    # What remesh asks.

    def _offer(self, lost: Collection[int], deadline: float) -> dict[str, Any]:
        """Describes the job without the lost ranks: names of tensors that this rank has, steps of which it
        has copies, what lives nowhere any more, and lost ranks that held nothing."""
        self._settle(deadline)
        more = self._guests.in_place_of(lost)
        held = {rank for origin in self._origins.values() for rank in origin.layout.ranks}
        return {
            "held": [n for n in self._origins if n in self._shapes or self._rank in more.get(n, {})],
            "steps": self._copies.steps,
            "gone": self._guests.gone(lost),
            "idle": [rank for rank in lost if rank not in held],
        }

    def _taken(self, step: int, lost: Collection[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of a step as this rank has it, with what it keeps for ranks that are lost, and `layouts`
        of it."""
        copy = self._copies.of(step)
        more = self._guests.in_place_of(lost)
        state: dict[str, Any] = dict(copy.values)
        layouts: dict[str, Any] = {}
        for name, origin in self._origins.items():
            boxes = more.get(name, {})
            mine = boxes.get(self._rank, [])
            own = copy.own.get(name)
            if own is None and not mine:
                continue
            if mine:
                views = box_views(self._kept[name], origin.shape, self._rank, copy.guests[name])
                own = memory_with(own, [views[box] for box in mine])
            state[name] = own
            if name not in self._own:
                layouts[name] = (self._guests.layout(name, boxes), origin.shape)
        return state, layouts

    def _settle(self, deadline: float) -> None:
        """Waits for a refresh on its way, and ends it where that takes long."""
        soon = min(time.monotonic() + _SETTLE, deadline)
        for until in (soon, soon + _SETTLE):
            while not self._handle.is_completed() and time.monotonic() < until:
                time.sleep(0.01)
            if not self._handle.is_completed():
                self._twin.twin(MOVE).abort(f"rank {self._rank} takes what is whole of its {_OP}")

    # Refreshes.

    def _refreshed(
        self,
        talk: Conversation,
        deadline: float,
        result: ReshardedState,
        prepared: Prepared,
        copy: Copy,
        number: int,
        values: Mapping[str, Any],
    ) -> tuple[Known, list[Call]]:
        try:
            known, made = self._calls.run(talk, prepared, deadline, result, copy.memory)
            guests = {name: x for name, x in result.items() if isinstance(x, torch.Tensor)}
            told = {name: x for name, x in result.items() if name not in guests and name != _ALWAYS}
            self._copies.whole(copy, number, guests, {**told, **values})
            # The copy before is written anew next. By then every rank knows that all have this one: a rank
            # that does not know has both.
            talk.rows.gather([number], max(deadline - time.monotonic(), 1e-3))
        except (LayoutError, PlanMismatchError):  # all ranks have it
            raise
        except BaseException as error:
            talk.parent.abort(f"rank {self._rank} gave up a refresh: {error}")
            raise
        return known, made

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
        return origin.layout, origin.shape

    def _check_partial(self) -> None:
        for name, origin in self._origins.items():
            if origin.layout.has_partial:
                raise LayoutError(f"{_OP}: {name!r} under {origin.layout} holds Partial; reduce it first")

    def _another(self, like: Mapping[str, Any]) -> LayoutError:
        unlike = sorted(name for name in {*like, *self._like} if like.get(name) != self._like.get(name))
        return LayoutError(
            f"{_OP}: the state has other tensors than at first: {unlike[0]!r} is {like.get(unlike[0])}, was "
            f"{self._like.get(unlike[0])}; make new Replicas for another state",
            rank=self._rank,
            op=_OP,
        )


def _likenesses(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Equal for states that are copied alike: also in what is one tensor under several names."""
    ties = same_memory(tensors.items())
    return {name: (likeness(tensor), ties.get(name)) for name, tensor in tensors.items()}
