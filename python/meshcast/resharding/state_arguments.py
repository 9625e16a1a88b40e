"""The arguments of reshard_state_dict on one rank, checked, and its side of the call made of them; states
that are read again at each call, and those of a WeightSource."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..base import checks
from ..base.boxes import box_text, extents, read_boxes
from ..base.values import CARRIED, carried, is_carried, not_carried
from ..errors import LayoutError, MeshcastError
from ..layout import Box, Layout
from ..planning.plan import STRATEGIES
from ..spec import TensorSpec
from ..transfers.block_scaled import Quantizing
from ..transfers.medium import own_obstacle
from .compiled import source_of
from .memory import Collected, Owner, check_outs, memory_key, near, owners_of, storage_of, tensor_of
from .meshes import Family, check_lost, family_of, positive_placements, ranks_then, renumbered
from .recorded import RecordedDestinations
from .state_entries import (
    Held,
    LoadedBoxes,
    Output,
    StateSide,
    Terms,
    Wanted,
    local_of,
    memory_with,
    same_memory,
)
from .tensor_map import maps_of

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = [
    "Current",
    "Given",
    "Reading",
    "SourcePass",
    "SourceState",
    "State",
    "StateCall",
    "WeightSource",
    "checked_call",
    "read_state",
    "receiving",
]

Loaded = dict[str, list[tuple[Box, torch.Tensor]]]


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
    quantize: Any = None
    scales: Any = None
    max_bytes_in_flight: Any = None
    digest: bool = False
    strict: bool = True
    strategy: str = "auto"
    topology: Topology | None = None
    lost: tuple[tuple[int, int], ...] = ()  # (number in layouts of what is held, its name in messages)
    numbers: Mapping[int, int] | None = None  # of ranks in what is held, by their numbers there
    own: Any = ()  # names, or a function of the name: entries of which each rank has its own
    loaded: Any = None  # {name: [(box, tensor)]}, in addition to what is held
    delta: bool = False
    lost_any: bool = False  # ranks of `lost` may have held nothing
    readers: bool = False  # as in Terms


@dataclass
class StateCall:
    """The checked arguments of this rank. side: what it sends the others; tensors: the entries of
    side.held that are here, `here` their names; meshes: of destinations that have some, with their
    placements. keys: of tensors and other values: the key in the state_dict, by name. quantizing: where this
    rank finds types of the user's own."""

    side: StateSide
    tensors: dict[str, torch.Tensor]
    here: frozenset[str]
    meshes: dict[str, tuple[DeviceMesh, tuple[Any, ...]]]
    outs: dict[str, torch.Tensor]
    keys: dict[str, str]
    loaded: Loaded
    topology: Topology | None
    quantizing: Quantizing
    recorded: RecordedDestinations | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)  # of recorded parameters, by their names

    def sent(self, written: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the memory of what is held, with copies of all that shares some with what this very call
        writes to: else neighbours, or a later batch, would read what has already come in."""
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
        written = {storage_of(local_of(out)) for out in (*self.outs.values(), *self.memory.values(), *others)}
        found = {}
        for name, x in self.tensors.items():
            if written and storage_of(local_of(x)) in written:
                continue
            seen = [x, x._local_tensor] if isinstance(x, DTensor) else [x]
            found[name] = [(tensor, tensor._version) for tensor in seen if not tensor.is_inference()]
        return found

    def key(self) -> Any:
        """Equal for calls of one kind, which may differ in values that are no tensors."""
        side = self.side._replace(carried=dict.fromkeys(self.side.carried, ""))
        fields = (tuple(each.items()) if isinstance(each, dict) else each for each in side)
        return (*fields, self.topology)


def checked_call(rank: int, given: Given) -> StateCall:
    """Raises LayoutError for what is wrong by itself."""
    state = _mapping("state_dict", read_state(given.state, rank))
    recorded = given.destinations if isinstance(given.destinations, RecordedDestinations) else None
    destinations, outs = receiving(given.destinations, given.out)
    layouts = {**getattr(state, "layouts", {}), **_mapping("layouts", given.layouts)}
    reading = Reading(rank, layouts, given.numbers)
    maps = maps_of(given.maps)
    selected, listed = (lambda _: True, ()) if given.only is None else _chosen("only", given.only)
    terms = _terms(given)
    check_lost([number for number, _ in given.lost], rank)
    dtype_of, floats = _dtypes(given.dtype), callable(given.dtype)
    quantizing = Quantizing(given.quantize)
    wanted: dict[str, Wanted] = {}
    meshes: dict[str, tuple[DeviceMesh, tuple[Any, ...]]] = {}
    for name, where in destinations.items():
        if selected(name):
            found, mesh, placements = reading.wanted(name, where, dtype_of(name), floats)
            wanted[name] = found._replace(quantize=quantizing.of(name))
            if mesh is not None:
                meshes[name] = (mesh, placements)
    if recorded is not None and recorded._after is not None and given.only is not None:
        raise LayoutError(
            "only= with after= of record_destinations, which changes other parameters once more"
        )
    if recorded is not None and given.quantize is not None:
        raise LayoutError(
            "quantize= with recorded destinations, whose loader takes the tensors as they are; quantise to "
            "(mesh, placements) or a Layout, or leave quantize= out"
        )
    landings = {} if recorded is None else recorded._landings
    landings = {name: landing for name, landing in landings.items() if selected(name)}
    for name, (device_type, dtype) in ({} if recorded is None else recorded._whole()).items():
        wanted[name] = Wanted(None, device_type, None, dtype if dtype.is_floating_point else None, True, True)
    new_name, renamed, unmatched = _renaming(given.rename, state)
    held: dict[str, Held] = {}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, str] = {}
    keys: dict[str, str] = {}
    for old, value in state.items():
        named = new_name(old)
        if named is None:
            continue
        name = named
        if name in held or name in values:
            raise LayoutError(f"rename makes {name!r} of {old!r} and of another key of the state_dict")
        keys[name] = old
        if isinstance(value, torch.Tensor | TensorSpec):
            each = held[name] = reading.held(old, value)
            if isinstance(value, torch.Tensor) and (each.layout is None or rank in each.layout.ranks):
                tensors[name] = value
        elif not (obstacle := not_carried(value)):
            if selected(name):
                values[name] = carried(value)
        elif terms.strict:
            raise LayoutError(
                f"{old!r} holds {obstacle}; tensors travel, and {CARRIED}; leave it out or pass strict=False"
            )
    outputs = {name: out for name, out in outs.items() if selected(name)}
    for name, out in outputs.items():
        _check_out(rank, name, out, wanted, meshes)
    out_ties = same_memory(outputs.items())
    check_outs({name: local_of(out) for name, out in outputs.items() if name not in out_ties})
    own, _ = _chosen("own", given.own)
    loaded = _loaded(given.loaded)
    by_name, quantized = (
        each if isinstance(each, Mapping) and given.only is None else ()
        for each in (given.dtype, given.quantize)
    )
    side = StateSide(
        held=held,
        wanted=wanted,
        outs={
            name: Output(tuple(out.shape), out.dtype, not isinstance(out, DTensor))
            for name, out in outputs.items()
        },
        ties=same_memory(tensors.items()),
        out_ties=out_ties,
        carried=values,
        renamed=renamed,
        unmatched={
            "rename": tuple(unmatched),
            "only": tuple(name for name in listed if name not in {*wanted, *values, *landings}),
            "layouts": tuple(new_name(old) or old for old in layouts if old not in state),
            "dtype": tuple(name for name in by_name if name not in wanted),
            "quantize": tuple(name for name in quantized if name not in wanted),
        },
        selects=given.only is not None,
        own=tuple(name for name in (*held, *values) if own(name)),
        dtypes=_served_dtypes(held, dtype_of, floats) if given.readers else {},
        loaded={
            name: LoadedBoxes(parts[0][1].dtype, parts[0][1].device.type, tuple(box for box, _ in parts))
            for name, parts in loaded.items()
        },
        recorded=landings,
        skipped=() if recorded is None else recorded.skipped,
        maps=maps,
        scales=_scales(given.scales),
        options=terms,
        obstacles=(own_obstacle(copies_only=False), own_obstacle(copies_only=True)),
    )
    here = frozenset(tensors)
    call = StateCall(side, tensors, here, meshes, outputs, keys, loaded, given.topology, quantizing)
    if recorded is not None:
        call = replace(call, recorded=recorded, memory=recorded._memory())
    return call


def _served_dtypes(
    held: Mapping[str, Held], dtype_of: Callable[[str], torch.dtype | None], floats: bool
) -> dict[str, torch.dtype]:
    """The dtypes that are asked for by name. floats: of floating-point tensors alone."""
    asked = {
        name: dtype_of(name) for name, each in held.items() if each.dtype.is_floating_point or not floats
    }
    return {name: dtype for name, dtype in asked.items() if dtype is not None}


def receiving(destinations: Any, out: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns destinations= and out= where tensors among the destinations are outputs as well, and outputs
    are destinations. Entries of the state dict of a model that are no tensors come along by themselves.
    Recorded destinations have memory of their own."""
    if isinstance(destinations, RecordedDestinations):
        if out:
            raise LayoutError("out= with recorded destinations, which have the memory that values arrive in")
        return {}, {}
    places, outs = _received("destinations", destinations), _received("out", out)
    for name, x in places.items():
        if isinstance(x, DTensor) and x.device_mesh.get_coordinate() is None:
            continue
        if isinstance(x, torch.Tensor):
            outs.setdefault(name, x)
    for name, x in outs.items():
        if isinstance(x, torch.Tensor):
            places.setdefault(name, x)
    return places, outs


def _received(what: str, given: Any) -> dict[str, Any]:
    found = _mapping(what, given)
    if any(isinstance(x, torch.Tensor) for x in found.values()):
        return {name: x for name, x in found.items() if isinstance(x, torch.Tensor) or not is_carried(x)}
    return dict(found)


def _terms(given: Given) -> Terms:
    limit, dtype = given.max_bytes_in_flight, given.dtype
    return Terms(
        None if limit is None else checks.integer("max_bytes_in_flight", limit, 1, checks.MAX_INT64),
        bool(given.digest),
        bool(given.strict),
        checks.choice("strategy", given.strategy, STRATEGIES),
        _floating(dtype) if isinstance(dtype, torch.dtype | str) else None,
        given.lost,
        given.delta,
        given.lost_any,
        given.readers,
    )


def _floating(dtype: Any) -> torch.dtype:
    found = checks.dtype(dtype)
    if not found.is_floating_point:
        raise LayoutError(f"dtype {found}: only floating-point tensors are cast, to a floating dtype")
    return found


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        remedy = ": pass its state_dict()" if hasattr(value, "state_dict") else ""
        raise LayoutError(f"{name} must be a mapping by name, found {type(value).__name__}{remedy}")
    for key in value:
        if not isinstance(key, str):
            raise LayoutError(f"{name} has the key {checks.shown(key)}; names are text")
    return value


def _chosen(what: str, given: Any) -> tuple[Callable[[str], bool], Sequence[str]]:
    """Reads names, or a function of the name. Returns a test for what they choose, and names that are
    listed."""
    if callable(given):
        return (lambda name: bool(given(name))), ()
    listed = checks.listed(what, given)
    return set(listed).__contains__, listed


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
        raise LayoutError(f"rename makes {checks.shown(new)} of {old!r}: expected a name, or None")
    return new


def _dtypes(given: Any) -> Callable[[str], torch.dtype | None]:
    """The dtype asked for by name, where that differs by name."""
    if given is None or isinstance(given, torch.dtype | str):
        return lambda _: None
    if not callable(given) and not isinstance(given, Mapping):
        raise LayoutError(
            f"dtype {checks.shown(given)}: expected a torch dtype, a mapping by name or a function of "
            "the name"
        )
    ask = given.get if isinstance(given, Mapping) else given

    def asked(name: str) -> torch.dtype | None:
        found = ask(name)
        return None if found is None else _floating(found)

    return asked


def _scales(given: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    scales: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, pair in _mapping("scales", given).items():
        read = checks.listed(f"scales of {name!r}", pair)
        if len(read) != 2 or not isinstance(read[0], str):
            raise LayoutError(
                f"scales has {checks.shown(pair)} for {name!r}: expected the name of its scales and "
                "the sizes of a block"
            )
        block = checks.listed(f"block of {name!r}", read[1])
        sizes = tuple(checks.integer(f"block of {name!r}", by, 1, checks.MAX_INT64) for by in block)
        scales[name] = (read[0], sizes)
    return scales


def _check_out(
    rank: int, name: str, out: Any, wanted: Mapping[str, Wanted], meshes: Mapping[str, Any]
) -> None:
    if name not in wanted:
        raise LayoutError(f"out has {name!r}, for which no destination is given")
    if not isinstance(out, torch.Tensor):
        raise LayoutError(f"the output of {name!r} is a {type(out).__name__}, expected a DTensor")
    where = wanted[name].layout
    if isinstance(out, DTensor):
        mesh, placements = meshes.get(name, (None, ()))
        if mesh is None:
            place = "a whole copy" if where is None else where
            raise LayoutError(f"the output of {name!r} is a DTensor, its destination {place} plain")
        if out.device_mesh is mesh and out.placements == tuple(placements):
            return  # as for most of a state: reading a mesh costs more than all else here
        expected = Layout(mesh, positive_placements(placements, out.ndim))
        found = Layout(out.device_mesh, out.placements)
        if expected != found or out.device_mesh != mesh:
            raise LayoutError(f"the output of {name!r} is under {found}, its destination is {expected}")
        return
    if where is None:
        return
    whole = not where.by_boxes and all(p.is_replicate() for p in where.placements)
    if not (wanted[name].plain or whole):
        raise LayoutError(
            f"the output of {name!r} is a plain tensor, its destination {where} no whole copy; give a "
            "DTensor, or a Layout as destination"
        )
    if rank not in where.ranks:
        raise LayoutError(f"rank {rank} has an output for {name!r}, but is not in {where}")


def _loaded(given: Any) -> Loaded:
    """The argument {name: [(box, tensor)]}, checked. Raises LayoutError naming the entry that is wrong."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise LayoutError(f"loaded must be a mapping by name, found {type(given).__name__}")
    found: Loaded = {}
    for name, parts in given.items():
        pairs = [checks.listed(f"loaded {name!r}", pair) for pair in checks.listed("loaded", parts)]
        if any(len(pair) != 2 or not isinstance(pair[1], torch.Tensor) for pair in pairs):
            raise LayoutError(f"loaded has {checks.shown(parts)} for {name!r}: expected (box, tensor) pairs")
        if not pairs:
            continue
        try:
            _, read = read_boxes({0: [box for box, _ in pairs]})
        except LayoutError as error:
            raise LayoutError(f"loaded {name!r}: {error}") from None
        boxes = read[0]
        tensors = [tensor.detach() for _, tensor in pairs if tensor.numel()]
        if [extents(box) for box in boxes] != [tuple(tensor.shape) for tensor in tensors]:
            raise LayoutError(
                f"loaded {name!r} has boxes {', '.join(map(box_text, boxes))} for tensors of shapes "
                f"{[tuple(tensor.shape) for tensor in tensors]}; a tensor has just the elements of its box"
            )
        if len({(tensor.dtype, tensor.device.type) for tensor in tensors}) > 1:
            raise LayoutError(f"loaded {name!r} has tensors of different dtypes or devices")
        if tensors:
            found[name] = list(zip(boxes, tensors, strict=True))
    return found


class Reading:
    """Reads entries for one rank, each distinct layout once."""

    def __init__(
        self, rank: int, layouts: Mapping[str, Any], numbers: Mapping[int, int] | None = None
    ) -> None:
        """numbers: of ranks in what is held, by what meshes and layouts there call them; None: the same."""
        self._rank = rank
        self._layouts = layouts
        self._numbers = numbers
        self._then = next((old for old, new in (numbers or {}).items() if new == rank), None)
        self._known: dict[Any, tuple[Layout, Family | None]] = {}

    def held(self, name: str, value: torch.Tensor | TensorSpec) -> Held:
        """Raises LayoutError for a tensor that cannot be described."""
        if isinstance(value, DTensor):
            spec = value._spec
            meta = spec.tensor_meta
            assert meta is not None  # of a DTensor there is one
            key = (spec.mesh, spec.placements, getattr(spec, "shard_order", None), len(meta.shape))
            found = self._known.get(key)
            if found is None:
                source = source_of(value, self._rank, False, ranks_of=self._ranks_of)
                found = self._known[key] = self._called(name, source.layout, family_of(spec.mesh))
            return Held(tuple(meta.shape), meta.dtype, found[0], spec.mesh.device_type, found[1])
        if isinstance(value, TensorSpec):
            renumbers = self._numbers is not None
            source = source_of(value, self._rank, False, spec_inside=renumbers, ranks_of=self._ranks_of)
            layout, family = self._called(name, source.layout, family_of(value.mesh))
            if self._rank in layout.ranks:
                raise LayoutError(f"rank {self._rank} holds {name!r} and must pass its DTensor, not a spec")
            return Held(source.shape, source.dtype, layout, source.device_type, family)
        device = value.device.type
        given = self._layouts.get(name)
        if given is None:
            return Held(tuple(value.shape), value.dtype, None, device)
        layout, shape = _given_layout(name, given, value)
        layout, _ = self._called(name, layout, None)
        local = layout.local_shapes(shape).get(self._rank)
        if local != tuple(value.shape):
            raise LayoutError(
                f"{name!r} has the local shape {tuple(value.shape)}, but {layout} of {shape} gives "
                f"rank {self._rank} {'nothing' if local is None else local}"
            )
        return Held(shape, value.dtype, layout, device)

    def _ranks_of(self, mesh: DeviceMesh) -> Any:
        return mesh if self._numbers is None else ranks_then(mesh, self._then)

    def _called(self, name: str, layout: Layout, family: Family | None) -> tuple[Layout, Family | None]:
        """With the numbers that ranks have now."""
        if self._numbers is None:
            return layout, family
        if layout.has_partial:
            raise LayoutError(
                f"{name!r} under {layout} holds Partial, whose values are reduced in the previous "
                "group; reduce it there"
            )
        layout = renumbered(layout, self._numbers, f"{name!r}")
        if family is not None:
            ranks = tuple(self._numbers.get(rank, -1 - rank) for rank in family.ranks)
            family = family._replace(ranks=ranks)
        return layout, family

    def wanted(
        self, name: str, where: Any, dtype: torch.dtype | None, floats: bool
    ) -> tuple[Wanted, DeviceMesh | None, Any]:
        """A destination, with its mesh and placements where it has some."""
        if isinstance(where, DTensor):
            where = (where.device_mesh, where.placements)
        if isinstance(where, torch.Tensor):
            if where.device.type not in ("cpu", "cuda"):
                raise LayoutError(
                    f"the destination of {name!r} is a tensor on {where.device.type}, which has no memory to "
                    "receive into; make the module's tensors first (to_empty), or give (mesh, placements) or "
                    "a Layout"
                )
            return Wanted(None, where.device.type, None, dtype, True, floats), None, None
        if isinstance(where, Layout):
            where = (where, "cpu")
        pair = where if isinstance(where, tuple | list) and len(where) == 2 else (None, None)
        if isinstance(pair[0], Layout) and pair[1] in ("cpu", "cuda"):
            if pair[0].has_partial:
                raise LayoutError(f"the destination of {name!r}, {pair[0]}, holds Partial")
            return Wanted(pair[0], pair[1], None, dtype, True, floats), None, None
        if not isinstance(pair[0], DeviceMesh):
            raise LayoutError(
                f"the destination of {name!r} must be (mesh, placements), a Layout or a tensor to receive "
                f"into, found {checks.shown(where)}"
            )
        mesh, placements = pair[0], checks.listed(f"placements of {name!r}", pair[1])
        found = self._known.get((mesh, placements))
        if found is None:
            layout = Layout(mesh, placements)
            if layout.has_partial:
                raise LayoutError(
                    f"destination placements {placements} of {name!r} hold Partial; ask for Replicate "
                    "or Shard instead"
                )
            found = self._known[mesh, placements] = (layout, family_of(mesh))
        return Wanted(found[0], mesh.device_type, found[1], dtype, False, floats), mesh, placements


def _given_layout(name: str, given: Any, value: torch.Tensor) -> tuple[Layout, tuple[int, ...]]:
    """A layout of `layouts=` and the global shape."""
    layout, shape = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layouts has {checks.shown(given)} for {name!r}: expected a Layout, or (Layout, shape)"
        )
    if shape is not None:
        return layout, checks.shape(shape)
    boxes = [box for _, pieces in layout._held for box, *_ in pieces]
    if boxes:  # they end where the tensor does
        return layout, tuple(max(box[d][1] for box in boxes) for d in range(len(boxes[0])))
    if not layout.by_boxes and all(p.is_replicate() for p in layout.placements):
        return layout, tuple(value.shape)
    raise LayoutError(
        f"layouts has {layout} for {name!r}, which does not say how large the tensor is; give (Layout, shape)"
    )


class WeightSource(Protocol):
    """The weights of a trainer in the form that vLLM's engines take. `metadata` has name, shape and dtype of
    each tensor of the model, on all ranks, and `owners`, `mesh_shape` and `placements` of those that not
    every rank has. `iter_local` yields (name, shard) of what this rank owns, or `iter_full` (name, whole
    tensor), in the order of `metadata`."""

    @property
    def metadata(self) -> Sequence[Any]: ...


class SourceState(dict[str, Any]):
    """Tensors that a WeightSource has yielded. layouts: of shards, with the shapes of the whole tensors."""

    def __init__(self) -> None:
        self.layouts: dict[str, tuple[Layout, tuple[int, ...]]] = {}


def read_state(given: Any, rank: int) -> Any:
    """Returns what a WeightSource yields, as a state dict; anything else as it is."""
    if isinstance(given, Mapping) or not _is_source(given):
        return given
    once = SourcePass(given, rank)
    return once.take(once.metadata, last=True)


def _is_source(given: Any) -> bool:
    return not isinstance(given, torch.nn.Module) and any(
        callable(getattr(given, each, None)) for each in ("iter_local", "iter_full")
    )


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Raises what a source raises there as a MeshcastError."""
    try:
        yield
    except MeshcastError:
        raise
    except Exception as error:
        raise MeshcastError(f"the source failed {where}: {type(error).__name__}: {error}") from error


class SourcePass:
    """One pass over a WeightSource on one rank. Tensors that do not fit its metadata are refused.

    Attributes:
        metadata: that of the source, of the tensors of all ranks.
        whole: the source yields whole tensors alone. The first owner of each then holds it.

    Raises LayoutError for metadata that are wrong by themselves, and what the source raises as a
    MeshcastError.
    """

    def __init__(self, source: WeightSource, rank: int, everyone: Sequence[int] | None = None) -> None:
        """everyone: the owners of tensors of which the metadata names none; None: all ranks that have a
        source, as for plain tensors."""
        self._rank, self._everyone = rank, everyone
        self._layouts: dict[Any, Layout] = {}
        with _reading("at its metadata"):
            self.metadata = list(source.metadata)
            known: Callable[[], bool] | None = getattr(source, "implements_iter_local", None)
            local = callable(getattr(source, "iter_local", None)) if known is None else known()
            self.whole = not local
            self._pairs = iter(getattr(source, "iter_local" if local else "iter_full")())
        names: set[str] = set()
        for meta in self.metadata:
            name = getattr(meta, "name", None)
            if not isinstance(name, str) or name in names:
                what = f"names {name!r} twice" if isinstance(name, str) else f"has {checks.shown(meta)}"
                raise LayoutError(f"the metadata of the source {what}: expected a name, shape and dtype each")
            names.add(name)

    def owners(self, meta: Any) -> tuple[int, ...] | None:
        found = getattr(meta, "owners", None)
        found = self._everyone if found is None else found
        return None if found is None else tuple(found)

    def take(self, metadata: Sequence[Any], *, last: bool = False) -> SourceState:
        """The next tensors, which are those of `metadata` that this rank owns. last: there are no more."""
        state, collected = SourceState(), Collected()
        for meta in metadata:
            owners = self.owners(meta)
            if owners is not None and self._rank not in owners:
                continue
            tensor = self._next(meta.name)
            layout = None if owners is None else self._layout(meta, owners)
            shape, dtype = checks.shape(meta.shape), checks.dtype(meta.dtype)
            local = shape if layout is None or self.whole else layout.local_shapes(shape)[self._rank]
            if isinstance(tensor, DTensor) or (tuple(tensor.shape), tensor.dtype) != (local, dtype):
                kind = "a DTensor of " if isinstance(tensor, DTensor) else ""
                raise LayoutError(
                    f"the source yields {kind}{tensor.dtype} {tuple(tensor.shape)} for {meta.name!r}, where "
                    f"its metadata gives rank {self._rank} {dtype} {local}"
                )
            if owners is None or not self.whole or self._rank == owners[0]:
                collected.add("the source", meta.name, tensor)
                state[meta.name] = tensor.detach()
                if layout is not None:
                    state.layouts[meta.name] = layout, shape
        if last and (more := self._pull("at its end")) is not None:
            raise LayoutError(f"the source yields {checks.shown(more[0])}, which is not in its metadata")
        return state

    def _next(self, expected: str) -> torch.Tensor:
        pair = self._pull(f"before {expected!r}")
        if pair is None:
            raise LayoutError(
                f"the source ended before {expected!r}, which its metadata gives rank {self._rank}"
            )
        name, tensor = pair
        if name != expected or not isinstance(tensor, torch.Tensor):
            found = checks.shown(name) if name != expected else f"no tensor for {name!r}"
            raise LayoutError(f"the source yields {found} where its metadata has {expected!r}")
        return tensor

    def _pull(self, where: str) -> tuple[Any, Any] | None:
        with _reading(where):
            pair = next(self._pairs, None)
            return None if pair is None else (pair[0], pair[1])

    def _layout(self, meta: Any, owners: tuple[int, ...]) -> Layout:
        key: Any = (owners[:1] if self.whole else owners, (), None)
        if not self.whole and getattr(meta, "placements", None) is not None:
            key = (owners, tuple(getattr(meta, "mesh_shape", None) or ()), tuple(meta.placements))
        if key not in self._layouts:
            self._layouts[key] = self._read_layout(meta.name, *key)
        return self._layouts[key]

    def _read_layout(self, name: str, owners: tuple[int, ...], mesh_shape: Any, placements: Any) -> Layout:
        read: list[Any] = [Replicate()] if placements is None else []
        for each in placements or ():
            kind = type(each).__name__  # torch's, or vLLM's own
            if kind not in ("Shard", "Replicate"):
                raise LayoutError(
                    f"the metadata of the source has {name!r} under {each!r}: Shard and Replicate are known"
                )
            read.append(Shard(each.dim) if kind == "Shard" else Replicate())
        mesh = checks.shape(mesh_shape or (len(owners),))
        if torch.Size(mesh).numel() != len(owners):
            raise LayoutError(f"the metadata of the source has {name!r} on a mesh {mesh} of ranks {owners}")
        return Layout(torch.tensor(owners).view(mesh), read)


State = Mapping[str, Any] | torch.nn.Module | WeightSource | Callable[[], Mapping[str, Any] | WeightSource]


class Current:
    """A state that may get other memory between calls.

    given: {name: entry}, a module, whose state_dict() is taken at each look, a WeightSource, or a function
    that returns a mapping or a source, which is called at each look. Entries of a mapping that share the
    memory of a module's parameters or buffers, as those of its state_dict() do, stand for these: where the
    module has its tensor in other memory by now, the look finds that one. None: no entries.

    Raises LayoutError for anything else.
    """

    def __init__(self, what: str, given: Any) -> None:
        self._what, self.given = what, given
        self._entries: dict[str, Any] = {}  # of the mapping, as they were when it last changed
        self._memories: dict[str, Any] = {}
        self._owners: dict[str, list[Owner]] = {}
        module = isinstance(given, torch.nn.Module)
        self._ask: Callable[[], Any] | None = None
        if module or (callable(given) and not isinstance(given, Mapping)):
            self._ask = given.state_dict if module else given
        elif _is_source(given):
            self._ask = lambda: given
        elif given is not None:
            self.look()

    def look(self) -> Any:
        """The state as it is now, for `read_state`. Raises what the function raises, and LayoutError where it
        returns no state."""
        given = self.given if self._ask is None else self._ask()
        if given is None:
            return {}
        if not isinstance(given, Mapping) and _is_source(given):
            return given
        if not isinstance(given, Mapping):
            raise LayoutError(
                f"{self._what} must be a mapping by name, a module or a function that returns a mapping, "
                f"found {checks.shown(given)}"
            )
        return given if self._ask is not None else self._followed(given)

    def _followed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        memories = {name: memory_key(x) for name, x in given.items() if isinstance(x, torch.Tensor)}
        # Only of entries that the user has changed: the owners of others may have moved since.
        changed = {
            name: memory
            for name, memory in memories.items()
            if self._entries.get(name) is not given[name] or self._memories[name] != memory
        }
        if changed or len(memories) < len(self._memories):
            self._entries, self._memories = {name: given[name] for name in memories}, memories
            kept = {n: own for n, own in self._owners.items() if n in memories and n not in changed}
            self._owners = kept | owners_of(self._entries, changed)
        moved = {}
        for name, owners in self._owners.items():
            plain = not isinstance(given[name], DTensor)
            for owner in owners:
                tensor = tensor_of(owner)
                # A module has the whole parameters instead of FSDP2's shards now and then.
                if tensor is not None and isinstance(tensor, DTensor) != plain:
                    if memory_key(tensor) != memories[name]:
                        moved[name] = tensor.detach()
                    break
        return {**given, **moved} if moved else given
