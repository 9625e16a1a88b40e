"""The old and new places of the entries of a state, from the arguments of `remesh`, the names of entries of a
nested state, and the calls that the ranks of a job make together. Errors name neither call nor rank: callers
do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..base import checks
from ..base.values import CARRIED, is_carried, not_carried
from ..errors import Caller, LayoutError, MeshcastError
from ..layout import Layout
from ..resharding.meshes import Gone, lost_ranks, positive_placements, ranks_then
from ..resharding.state_arguments import Given
from ..resharding.state_entries import OP as MOVE
from ..resharding.state_run import Conversation, ReshardedState, StateRun
from ..spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from ..groups.parent import ParentGroup

__all__ = [
    "Inventory",
    "Nest",
    "New",
    "OP",
    "Old",
    "Ranks",
    "called_by",
    "check_entries",
    "copies_of",
    "destinations",
    "old_layouts",
    "read_ranks",
    "run",
    "tensors_in",
]


OP = "remesh"

Place = Layout | tuple[Layout, Sequence[int]] | tuple[DeviceMesh, "Sequence[Placement]"]
Old = Mapping[str, Place | None] | Callable[[str], Place | None] | None
New = Mapping[str, Any] | Callable[[str], Any]

# Lost ranks of a group that was made again get numbers that none of its ranks has.
_GONE = 1 << 30


class Ranks(NamedTuple):
    """lost: (number in layouts of what is held, old rank); numbers: in those layouts by old rank, None where
    they are the same. silent: ranks of the group that make no call."""

    lost: tuple[tuple[int, int], ...]
    numbers: dict[int, int] | None
    silent: tuple[int, ...]

    def previous(self, rank: int) -> int | None:
        """Returns the number that a present rank had; None where it was not there."""
        if self.numbers is None:
            return rank
        return next((old for old, new in self.numbers.items() if new == rank), None)


class Inventory(NamedTuple):
    """The facts that a rank reports to the others before they move the state.

    held: names of tensors that it has. copies: names of whole tensors that it fills. If it has replicas,
    their steps: those whose copies are complete here; gone: boxes that no rank holds any longer; idle: lost
    ranks that held nothing.
    """

    held: list[str]
    copies: Sequence[str] = ()
    steps: Sequence[int] | None = None
    gone: Sequence[Gone] = ()
    idle: Sequence[int] = ()


def read_ranks(lost: Any, ranks: Any, members: Collection[int], rank: int) -> Ranks:
    """members: of the group; rank: this one. Raises LayoutError for what is no map of ranks, and for a rank
    that is called lost and lives."""
    dead = lost_ranks(lost)
    if ranks is None:
        if rank in dead:
            raise LayoutError(f"lost= names rank {rank}, which yet makes the call")
        return Ranks(tuple((each, each) for each in dead), None, dead)
    if not isinstance(ranks, Mapping) or not ranks:
        raise LayoutError(f"ranks {checks.shown(ranks)}: expected {{old rank: new rank}}, of one or more")
    numbers: dict[int, int] = {}
    for old, new in ranks.items():
        old = checks.integer("ranks: old rank", old, 0, _GONE - 1)
        numbers[old] = checks.integer(f"ranks: new rank of {old}", new, 0, _GONE - 1)
    twice = [new for new in numbers.values() if list(numbers.values()).count(new) > 1]
    if twice:
        raise LayoutError(f"ranks gives several old ranks the new rank {twice[0]}")
    both = [old for old in dead if old in numbers]
    if both:
        raise LayoutError(
            f"old rank {both[0]} is named in lost=, but ranks= gives it the new rank {numbers[both[0]]}; it "
            "is one or the other"
        )
    outside = [new for new in numbers.values() if new not in members]
    if outside:
        raise LayoutError(f"ranks gives the new rank {outside[0]}, which is not in the group")
    for old in dead:
        numbers[old] = _GONE + checks.integer("lost rank", old, 0, _GONE - 1)
    return Ranks(tuple((numbers[old], old) for old in dead), numbers, ())


def old_layouts(state: Mapping[str, Any], old: Any, previous: int | None) -> dict[str, Any]:
    """Returns layouts= of reshard_state_dict: of plain tensors that are no copies. Raises LayoutError for
    what is no layout, or not that of a DTensor.

    previous: the number that this rank had, None where it was not there.
    """
    if old is None:
        return {}
    if not callable(old) and not isinstance(old, Mapping):
        raise LayoutError(
            f"old must be a mapping by name or a function of the name, found {checks.shown(old)}"
        )
    found: dict[str, Any] = {}
    for name in state if callable(old) else old:
        place = old(name) if callable(old) else old[name]
        value = state.get(name)
        if place is None or (name in state and is_carried(value)):
            continue
        layout, shape = _layout_of(name, place, previous)
        if isinstance(value, DTensor | TensorSpec):
            mesh = value.device_mesh if isinstance(value, DTensor) else value.mesh
            own = Layout(ranks_then(mesh, previous), positive_placements(value.placements, len(value.shape)))
            if not layout.by_boxes:
                layout = Layout(
                    torch.tensor(layout.ranks).reshape(layout.mesh_shape),
                    positive_placements(layout.placements, len(value.shape)),
                )
            if own != layout:
                raise LayoutError(f"old says that {name!r} was under {layout}, but it is under {own}")
        elif shape is None:
            found[name] = layout
        else:
            found[name] = (layout, shape)
    return found


def _layout_of(name: str, place: Any, previous: int | None) -> tuple[Layout, Any]:
    """Returns a layout and, where it is given, the global shape."""
    if isinstance(place, Layout):
        return place, None
    if isinstance(place, tuple | list):
        if len(place) == 2 and isinstance(place[0], Layout):
            return place[0], place[1]
        if len(place) in (2, 3) and isinstance(place[0], DeviceMesh):
            placements = checks.listed(f"placements of {name!r}", place[1])
            shape = place[2] if len(place) == 3 else None
            return Layout(ranks_then(place[0], previous), placements), shape
    raise LayoutError(
        f"old has {checks.shown(place)} for {name!r}: expected a Layout, (Layout, shape), (mesh, "
        "placements) or (mesh, placements, shape)"
    )


def copies_of(new: Any) -> list[str]:
    """Returns the names of whole tensors that are to be filled here."""
    if not callable(new) and not isinstance(new, Mapping | None):
        raise LayoutError(
            f"new must be a mapping by name or a function of the name, found {checks.shown(new)}"
        )
    if not isinstance(new, Mapping):
        return []
    return [name for name, where in new.items() if _is_whole(where)]


def _is_whole(where: Any) -> bool:
    return isinstance(where, torch.Tensor) and not isinstance(where, DTensor)


def destinations(
    new: Any, names: Iterable[str], copies: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns destinations= and out= of reshard_state_dict.

    names: of all tensors that some rank holds. copies: ranks that have a whole tensor to fill, by name.
    """
    asked = {name: new(name) for name in names} if callable(new) else dict(new or {})
    found: dict[str, Any] = {}
    outs: dict[str, torch.Tensor] = {}
    for name, where in asked.items():
        if isinstance(where, DTensor):
            found[name] = (where.device_mesh, where.placements)
            if where.device_mesh.get_coordinate() is not None:
                outs[name] = where
        elif _is_whole(where):
            if name not in copies:
                raise LayoutError(
                    f"new gives a plain tensor for {name!r}: a function gives DTensors or "
                    "destinations, as all ranks must know who gets a copy; pass a mapping"
                )
            found[name] = (Layout(sorted(copies[name]), [Replicate()]), where.device.type)
            outs[name] = where
        elif not is_carried(where):  # a value that is no tensor is carried anyway
            found[name] = where
    return found, outs


_Path = tuple[Any, ...]  # keys and indices, from the outermost


class Nest:
    """The names of the entries of a nested state, as torch.distributed.checkpoint makes them:
    ``{"model": {"w": x}}`` has the entry "model.w".

    Dicts, lists and tuples are opened where the given state has tensors in them. All others are entries, and
    keep their types. The given state is that of a training that was just made, so all ranks open the same,
    however long they have trained.

    Attributes:
        names: of the entries of that state.
    """

    def __init__(self, state: Any) -> None:
        """Raises LayoutError for what is no mapping, and for names that are not unique."""
        if not isinstance(state, Mapping):
            raise LayoutError(f"state_dict() returned a {type(state).__name__}, expected a dict by name")
        self._opened: dict[_Path, type] = {(): dict}
        self._paths: dict[str, _Path] = {}
        try:
            self._open((), state)
        except RecursionError:
            raise LayoutError("state_dict() has a container that holds itself") from None
        self.names = frozenset(self.flat(state))

    def _open(self, path: _Path, value: Any) -> None:
        for key, item in _items(value):
            below = (*path, key)
            if not isinstance(item, torch.Tensor) and next(tensors_in(item), None) is not None:
                self._opened[below] = type(item)
                self._open(below, item)

    def flat(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a later state by their names."""
        found: dict[str, Any] = {}
        for path, value in self._leaves((), state):
            name = _dotted(path)
            if name in found:
                raise LayoutError(f"state_dict() has two entries with the name {name!r}; rename one")
            found[name], self._paths[name] = value, path
        return found

    def _leaves(self, path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
        for key, item in _items(value):
            below = (*path, key)
            if below in self._opened and _is_container(item):
                yield from self._leaves(below, item)
            else:
                yield below, item

    def nested(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Undoes flat(). Entries that this state never had go where their names say."""
        made: dict[_Path, dict[Any, Any]] = {path: {} for path in self._opened}
        for name, value in entries.items():
            path = self._paths.get(name) or self._place(name)
            made[path[:-1]][path[-1]] = value
        for path in sorted(made, key=len, reverse=True)[:-1]:
            kind, items = self._opened[path], made[path]
            built: Any = OrderedDict(items) if issubclass(kind, OrderedDict) else items
            if issubclass(kind, list | tuple):
                built = kind(items[at] for at in sorted(items))
            made[path[:-1]][path[-1]] = built
        return made[()]

    def _place(self, name: str) -> _Path:
        dicts = (path for path, kind in self._opened.items() if path and issubclass(kind, Mapping))
        above = [path for path in dicts if name.startswith(f"{_dotted(path)}.")]
        deepest = max(above, key=len, default=())
        return (*deepest, name[len(_dotted(deepest)) + 1 :]) if deepest else (name,)

    def above(self, name: str) -> list[str]:
        """Returns the names of the containers that an entry is in, and its own."""
        path = self._paths.get(name, (name,))
        return [_dotted(path[: end + 1]) for end in range(len(path))]


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) or type(value) in (list, tuple)


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_container(value):
        for _, item in _items(value):
            yield from tensors_in(item)


def check_entries(entries: Mapping[str, Any], remedy: str = "") -> None:
    """Raises LayoutError for an entry of a state that can go to no other rank. remedy: of the caller."""
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor) and (obstacle := not_carried(value)):
            raise LayoutError(
                f"{name!r} of state_dict() holds {obstacle}, which no other rank can take over. Expected: "
                f"tensors, {CARRIED}, and dicts, lists and tuples that have tensors when make() "
                f"returns{remedy}"
            )


def run(
    parent: ParentGroup, conversation: Conversation, deadline: float, given: Given | Exception
) -> ReshardedState:
    """Makes one call among all ranks. An error instead of arguments is raised here, and reported to the
    others."""
    if isinstance(given, Exception):
        call = StateRun(parent.rank, Given(None, None), wrong=given)
    else:
        call = StateRun(parent.rank, given)
    return conversation.run(call, deadline)


@contextmanager
def called_by(op: str, rank: int) -> Iterator[None]:
    """Makes the errors of calls in its block errors of `op`."""
    try:
        yield
    except MeshcastError as error:
        error.args = (str(error).replace(MOVE, op),)
        error.op = None if error.op == MOVE else error.op
        Caller(op, rank).name(error)
        raise
