"""The arguments of reshard_state_dict on one rank, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..base import checks
from ..base.boxes import Box
from ..base.values import CARRIED, carried, not_carried
from ..errors import LayoutError
from ..layout import Layout
from ..spec import TensorSpec
from ..transfers.gpu import own_obstacle
from .memory import check_outs, near, storage_of
from .meshes import check_lost, positive_placements
from .state_entries import (
    OP,
    Held,
    Loaded,
    Output,
    Reading,
    StateSide,
    Wanted,
    encode,
    local_of,
    memory_with,
    read_loaded,
    same_memory,
)
from .tensor_map import TensorMap

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = ["Given", "StateCall", "checked_call", "floating_name"]


@dataclass(frozen=True)
class Given:
    """The arguments of a call as the user gave them; documented at reshard_state_dict."""

    state: Any
    destinations: Any
    out: Any = None
    layouts: Any = None
    rename: Any = None
    maps: Any = ()
    only: Any = None
    dtype: Any = None
    scales: Any = None
    max_bytes_in_flight: Any = None
    digest: bool = False
    strict: bool = True
    strategy: str = "auto"
    topology: Topology | None = None
    lost: tuple[tuple[int, int], ...] = ()  # (number in layouts of what is held, what messages call it)
    numbers: Mapping[int, int] | None = None  # of ranks in what is held, by their numbers there
    own: Any = ()  # names, or a function of the name: entries of which each rank has its own
    loaded: Any = None  # {name: [(box, tensor)]}, beside what is held


@dataclass
class StateCall:
    """The checked arguments of this rank. held: by the names that they are sent under; tensors: those of them
    that are here; meshes: of destinations that have some, with their placements. values: entries that are no
    tensors, as text. The other fields are those of StateSide."""

    held: dict[str, Held]
    tensors: dict[str, torch.Tensor]
    wanted: dict[str, Wanted]
    meshes: dict[str, tuple[DeviceMesh, tuple[Any, ...]]]
    outs: dict[str, torch.Tensor]
    values: dict[str, Any]
    keys: dict[str, str]  # of tensors and values: the key in the state_dict, by name
    here: frozenset[str]  # names of `tensors`
    ties: dict[str, str]
    out_ties: dict[str, str]
    renamed: dict[str, str | None]
    unmatched: dict[str, list[str]]
    selects: bool
    own: list[str]
    loaded: Loaded
    maps: list[TensorMap]
    scales: dict[str, Any]
    options: dict[str, Any]
    topology: Topology | None

    def sent(self, written: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The memory of what is held, with copies of all that shares some with what this very call writes to:
        else neighbours, or a later batch, would read what has already come in."""
        shards = {name: local_of(x) for name, x in self.tensors.items()}
        for name, parts in self.loaded.items():
            shards[name] = memory_with(shards.get(name), [tensor for _, tensor in parts])
        if written:
            for name in near(shards, written):
                shards[name] = shards[name].clone()
        return shards

    def watched(self, others: Sequence[torch.Tensor]) -> dict[str, list[tuple[torch.Tensor, int]]]:
        """Returns the tensors that are held in other storages than those that this call itself writes to,
        each with its version now. It writes to the storages of the outputs and of `others`."""
        written = {storage_of(local_of(out)) for out in (*self.outs.values(), *others)}
        found = {}
        for name, x in self.tensors.items():
            if written and storage_of(local_of(x)) in written:
                continue
            seen = [x, x._local_tensor] if isinstance(x, DTensor) else [x]
            found[name] = [(tensor, tensor._version) for tensor in seen if not tensor.is_inference()]
        return found

    def output_specs(self) -> dict[str, Output]:
        return {
            name: Output(tuple(out.shape), checks.dtype_name(out.dtype), not isinstance(out, DTensor))
            for name, out in self.outs.items()
        }

    def loaded_specs(self) -> dict[str, tuple[str, str, tuple[Box, ...]]]:
        """Their dtype, device type and boxes."""
        found = {}
        for name, parts in self.loaded.items():
            first = parts[0][1]
            found[name] = (
                checks.dtype_name(first.dtype),
                first.device.type,
                tuple(box for box, _ in parts),
            )
        return found

    def key(self) -> Any:
        """Equal for calls of one kind."""
        return (
            tuple(self.held.items()),
            tuple(self.wanted.items()),
            tuple(self.output_specs().items()),
            tuple(self.ties.items()),
            tuple(self.out_ties.items()),
            tuple(self.values),
            tuple(self.renamed.items()),
            tuple((argument, tuple(names)) for argument, names in self.unmatched.items()),
            self.selects,
            tuple(self.own),
            tuple((name, *said) for name, said in self.loaded_specs().items()),
            tuple(self.maps),
            tuple((name, scale, tuple(block)) for name, (scale, block) in self.scales.items()),
            tuple(self.options.items()),
            self.topology,
        )

    def text(self) -> str:
        return encode(
            StateSide(
                held=self.held,
                wanted=self.wanted,
                outs=self.output_specs(),
                ties=self.ties,
                out_ties=self.out_ties,
                carried=self.values,
                renamed=self.renamed,
                unmatched=self.unmatched,
                selects=self.selects,
                own=self.own,
                loaded=self.loaded_specs(),
                maps=[each.wire() for each in self.maps],
                scales=self.scales,
                options=self.options,
                obstacles=[own_obstacle(copies_only=copies_only) for copies_only in (False, True)],
            )
        )


def checked_call(rank: int, given: Given) -> StateCall:
    """Raises LayoutError for what is wrong by itself."""
    state = _mapping("state_dict", given.state)
    destinations = _mapping("destinations", given.destinations)
    outs = _mapping("out", given.out)
    layouts = _mapping("layouts", given.layouts)
    reading = Reading(rank, layouts, given.numbers)
    maps = _maps(given.maps)
    selected, listed = _selection(given.only)
    options = {
        "max_bytes_in_flight": None
        if given.max_bytes_in_flight is None
        else checks.integer("max_bytes_in_flight", given.max_bytes_in_flight, 1, checks.MAX_INT64),
        "digest": bool(given.digest),
        "strict": bool(given.strict),
        "strategy": given.strategy,
        "dtype": floating_name(given.dtype) if isinstance(given.dtype, torch.dtype | str) else None,
        "lost": given.lost,
    }
    check_lost([number for number, _ in given.lost], rank, OP)
    dtype_of, floats = _dtypes(given.dtype), callable(given.dtype)
    wanted: dict[str, Wanted] = {}
    meshes: dict[str, tuple[DeviceMesh, tuple[Any, ...]]] = {}
    for name, where in destinations.items():
        if selected(name):
            wanted[name], mesh, placements = reading.wanted(name, where, dtype_of(name), floats)
            if mesh is not None:
                meshes[name] = (mesh, placements)
    new_name, renamed, unmatched = _renaming(given.rename, state)
    held: dict[str, Held] = {}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for old, value in state.items():
        named = new_name(old)
        if named is None:
            continue
        name = named
        if name in held or name in values:
            raise LayoutError(f"{OP}: rename makes {name!r} of {old!r} and of another key of the state_dict")
        keys[name] = old
        if isinstance(value, torch.Tensor | TensorSpec):
            each = held[name] = reading.held(old, value)
            if isinstance(value, torch.Tensor) and (each.layout is None or rank in each.layout.ranks):
                tensors[name] = value
        elif not (obstacle := not_carried(value)):
            if selected(name):
                values[name] = carried(value)
        elif options["strict"]:
            raise LayoutError(
                f"{OP}: {old!r} holds {obstacle}; tensors travel, and {CARRIED}; leave it out or pass "
                "strict=False"
            )
    outputs = {name: out for name, out in outs.items() if selected(name)}
    for name, out in outputs.items():
        _check_out(rank, name, out, wanted, meshes)
    out_ties = same_memory(outputs.items())
    check_outs({name: local_of(out) for name, out in outputs.items() if name not in out_ties}, OP)
    return StateCall(
        held=held,
        tensors=tensors,
        wanted=wanted,
        meshes=meshes,
        outs=outputs,
        values=values,
        keys=keys,
        here=frozenset(tensors),
        ties=same_memory(tensors.items()),
        out_ties=out_ties,
        renamed=renamed,
        unmatched={
            "rename": unmatched,
            "only": [name for name in listed if name not in wanted and name not in values],
            "layouts": [new_name(old) or old for old in layouts if old not in state],
            "dtype": [name for name in given.dtype if name not in wanted]
            if isinstance(given.dtype, Mapping) and given.only is None
            else [],
        },
        selects=given.only is not None,
        own=_own(given.own, [*held, *values]),
        loaded=read_loaded(given.loaded, OP),
        maps=maps,
        scales=_scales(given.scales),
        options=options,
        topology=given.topology,
    )


def _own(own: Any, names: Sequence[str]) -> list[str]:
    """The entries of this rank that are its own."""
    if callable(own):
        return [name for name in names if own(name)]
    chosen = set(checks.listed(f"{OP}: own", own))
    return [name for name in names if name in chosen]


def floating_name(dtype: Any) -> str:
    found = checks.dtype(dtype)
    if not found.is_floating_point:
        raise LayoutError(f"{OP}: dtype {found}: only floating-point tensors are cast, to a floating dtype")
    return checks.dtype_name(found)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LayoutError(f"{OP}: {name} must be a mapping by name, found {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise LayoutError(f"{OP}: {name} has the key {checks.shown(key)}; names are text")
    return value


def _maps(given: Any) -> list[TensorMap]:
    maps = [given] if isinstance(given, TensorMap) else list(checks.listed(f"{OP}: maps", given or ()))
    made: set[str] = set()
    for each in maps:
        if not isinstance(each, TensorMap):
            raise LayoutError(f"{OP}: maps has {checks.shown(each)}: expected a meshcast.TensorMap")
        for name in each.target_names():
            if name in made:
                raise LayoutError(f"{OP}: two maps make {name!r}")
            made.add(name)
        if not each.targets:
            raise LayoutError(f"{OP}: {each} has no targets")
    return maps


def _selection(only: Any) -> tuple[Callable[[str], bool], Sequence[str]]:
    """Returns a test for the names that a call is about, and the names that are listed."""
    if only is None:
        return (lambda _: True), ()
    if callable(only):
        return (lambda name: bool(only(name))), ()
    listed = checks.listed(f"{OP}: only", only)
    chosen = set(listed)
    return (lambda name: name in chosen), listed


def _renaming(
    rename: Any, state: Mapping[str, Any]
) -> tuple[Callable[[str], str | None], dict[str, str | None], list[str]]:
    """The name that each key gets, None to leave it out; what a dict of names says of own keys, and its other
    keys."""
    if rename is None:
        return (lambda name: name), {}, []
    if callable(rename):
        return (lambda name: _name(name, rename(name))), {}, []
    table = {old: _name(old, new) for old, new in _mapping("rename", rename).items()}
    known = {old: new for old, new in table.items() if old in state}
    return (lambda name: table.get(name, name)), known, [old for old in table if old not in state]


def _name(old: str, new: Any) -> str | None:
    if new is not None and not isinstance(new, str):
        raise LayoutError(f"{OP}: rename makes {checks.shown(new)} of {old!r}: expected a name, or None")
    return new


def _dtypes(given: Any) -> Callable[[str], str | None]:
    """The dtype asked for by name, where that differs by name."""
    if given is None or isinstance(given, torch.dtype | str):
        return lambda _: None
    if not callable(given) and not isinstance(given, Mapping):
        raise LayoutError(
            f"{OP}: dtype {checks.shown(given)}: expected a torch dtype, a mapping by name or a function of "
            "the name"
        )
    ask = given.get if isinstance(given, Mapping) else given

    def asked(name: str) -> str | None:
        found = ask(name)
        return None if found is None else floating_name(found)

    return asked


def _scales(given: Any) -> dict[str, Any]:
    scales: dict[str, Any] = {}
    for name, pair in _mapping("scales", given).items():
        read = checks.listed(f"{OP}: scales of {name!r}", pair)
        if len(read) != 2 or not isinstance(read[0], str):
            raise LayoutError(
                f"{OP}: scales has {checks.shown(pair)} for {name!r}: expected the name of its scales and "
                "the sizes of a block"
            )
        block = checks.listed(f"{OP}: block of {name!r}", read[1])
        sizes = [checks.integer(f"{OP}: block of {name!r}", by, 1, checks.MAX_INT64) for by in block]
        scales[name] = [read[0], sizes]
    return scales


def _check_out(
    rank: int, name: str, out: Any, wanted: Mapping[str, Wanted], meshes: Mapping[str, Any]
) -> None:
    if name not in wanted:
        raise LayoutError(f"{OP}: out has {name!r}, for which no destination is given")
    if not isinstance(out, torch.Tensor):
        raise LayoutError(f"{OP}: the output of {name!r} is a {type(out).__name__}, expected a DTensor")
    where = wanted[name].layout
    if isinstance(out, DTensor):
        mesh, placements = meshes.get(name, (None, ()))
        if mesh is None:
            raise LayoutError(f"{OP}: the output of {name!r} is a DTensor, its destination {where} plain")
        if out.device_mesh is mesh and out.placements == tuple(placements):
            return  # as for most of a state: reading a mesh costs more than all else here
        expected = Layout(mesh, positive_placements(placements, out.ndim))
        found = Layout(out.device_mesh, out.placements)
        if expected != found or out.device_mesh != mesh:
            raise LayoutError(f"{OP}: the output of {name!r} is under {found}, its destination is {expected}")
        return
    whole = not where.by_boxes and all(p.is_replicate() for p in where.placements)
    if not (wanted[name].plain or whole):
        raise LayoutError(
            f"{OP}: the output of {name!r} is a plain tensor, its destination {where} no whole copy; give a "
            "DTensor, or a Layout as destination"
        )
    if rank not in where.ranks:
        raise LayoutError(f"{OP}: rank {rank} has an output for {name!r}, but is not in {where}")
