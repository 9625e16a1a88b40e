"""reshard_state_dict: all weights of a model from one set of meshes to another, for example from a trainer to
its rollout workers, without a checkpoint.

A call has three parts. In the first round every rank says which version it has and whether it knows the
tensors; ranks that do not know them read their specs in the rendezvous store, once. Then the tensors travel.
In the last round the holders say whether their weights stayed unchanged meanwhile: only then does any rank
return them. All ranks see all rows, hence all raise the same.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..base import checks
from ..errors import (
    AbortedError,
    DeadlineExceededError,
    MeshcastError,
    PeerLostError,
    PlanMismatchError,
    typed,
    was_told,
)
from ..groups.parent import ParentGroup, parent_group, seconds
from ..groups.telling import raise_refused
from ..layout import Layout
from ..spec import TensorSpec
from ..transfers.persistent import PlanOptions
from .compiled_call import Compiled, compile_call
from .digest import shard_digest
from .state_arguments import StateCall, checked_call, floating_name
from .state_rows import Rows
from .state_specs import Entry, decode, merge
from .tensor_move import Destination, Source, wire_dtype

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor.placement_types import Placement

    from ..topology import Topology
    from ..transfers.call import Call

__all__ = ["ReshardedState", "reshard_state_dict"]

_OP = "reshard_state_dict"
_KEPT = 8  # kinds of call whose plans a group keeps
_PAUSE = 0.0002  # seconds between two looks at whether a GPU is through
_NONE = -1  # in a row: no version, nothing known
_REFUSED = -2  # this rank raises what it posts


class ReshardedState(dict[str, DTensor]):
    """{name: DTensor} in the order of the destinations; version: that of the weights, None if the holders
    gave none."""

    version: int | None = None


@dataclass
class _Known:
    """What a kind of call compiled to. Calls of one number are of one kind on all ranks."""

    number: int
    entries: list[Entry]
    batches: list[tuple[list[int], Compiled]]  # positions of its tensors, and their call


class _State:
    """Everything a process group keeps for its calls."""

    def __init__(self, parent: ParentGroup) -> None:
        self.rows = Rows(parent)
        self.versions: dict[tuple[str, ...], int] = {}  # the last that arrived, by the names of the tensors
        self.known: OrderedDict[Any, _Known] = OrderedDict()


def reshard_state_dict(
    state_dict: Mapping[str, DTensor | TensorSpec] | None,
    destinations: Mapping[str, tuple[DeviceMesh, Sequence[Placement]]],
    out: Mapping[str, DTensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_bytes_in_flight: int | None = None,
    version: int | None = None,
    digest: bool = False,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    timeout: float | timedelta | None = None,
) -> ReshardedState:
    """Moves every named tensor to its destination (mesh, placements), as one batch. Records no gradient.

    A collective of all ranks of `group`. Ranks that hold nothing need not know what there is: they pass None
    or {} and learn shapes, dtypes and sources from the others at the first call of a kind.

    Args:
        state_dict: {name: DTensor}. A rank in the mesh of a tensor must have it; others may have a shell or a
            TensorSpec, or nothing.
        destinations: the same on every rank.
        out: {name: DTensor} to receive into, for any of the names, on ranks inside its destination mesh; its
            dtype is then that of the result. Outputs may be interleaved in memory, as columns of one matrix
            are; two elements never have one address. Sources may share memory with outputs, their own and
            others: they are copied before anything moves, whatever max_bytes_in_flight says. Changes of a
            source that is in one storage with an output are found by digests alone.
        dtype: of the results of floating-point tensors; others keep theirs.
        max_bytes_in_flight: at most so many bytes (of global tensors, as they travel) are moved at a time;
            a single larger tensor goes alone. None: everything at once.
        version: a number that rises from call to call. Holders all give one or none; a rank that holds
            nothing may give the one that it expects. Any that differ, or do not exceed the last that
            arrived, raise on every rank before a tensor moves.
        digest: compare a digest of every tensor at both ends and between replicas. Costs one pass over the
            data on every rank.
        strict: refuse tensors that have no destination; False leaves them out.
        group, strategy, topology, timeout: see meshcast.reshard; the timeout is for the whole call.

    Returns:
        {name: DTensor} with attribute `version`; shells on ranks outside a destination mesh.

    Raises:
        LayoutError: a value that is not a DTensor, a missing or superfluous name, outputs that do not fit, or
            that share addresses (see reshard_).
        PlanMismatchError: ranks or versions disagree.
        MeshcastError: a source was changed while it travelled, or a digest differs: the results are torn and
            no rank returns them. Outputs are then undefined.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        weights = {"w": distribute_tensor(torch.ones(4, 2), training, [Shard(0)])}
        held = weights if dist.get_rank() in (0, 1) else None
        received = meshcast.reshard_state_dict(held, {"w": (serving, [Shard(1)])}, digest=True)
        assert bool((received["w"].to_local() == 1).all())
    """
    try:
        parent = parent_group(group, _OP)
    except Exception as error:
        raise_refused(error, _OP, (), group, timeout)
    state: _State | None = parent.extras.get(_OP)
    if state is None:
        state = parent.extras[_OP] = _State(parent)
    number = state.rows.number()
    refused: Exception | None = None
    call: StateCall | None = None
    known: _Known | None = None
    given, limit, text = _NONE, parent.timeout, ""
    try:
        limit = seconds(timeout, parent.timeout)
        if version is not None:
            given = checks.integer(f"{_OP}: version", version, 0, (1 << 62) - 1)
        options = {
            "dtype": None if dtype is None else floating_name(dtype),
            "max_bytes_in_flight": None
            if max_bytes_in_flight is None
            else checks.integer("max_bytes_in_flight", max_bytes_in_flight, 1, checks.MAX_INT64),
            "digest": bool(digest),
            "strict": bool(strict),
            "strategy": strategy,
        }
        call = checked_call(
            parent.rank,
            {} if state_dict is None else state_dict,
            destinations,
            {} if out is None else out,
            options,
            topology,
        )
        known = state.known.get(call.key())
        text = call.text() if known is None else ""
    except Exception as error:
        refused = typed(error, _OP, parent.rank)
    deadline = time.monotonic() + limit
    names = () if call is None or refused is not None else tuple(call.destinations)
    row = [
        _REFUSED if refused is not None else _NONE if known is None else known.number,
        given,
        state.versions.get(names, _NONE),
        int(call is not None and bool(call.held)),
    ]
    rows = state.rows.gather(row, _left(deadline))
    exchange = f"specs {number}"
    if refused is not None:
        state.rows.post(exchange, str(refused))
        raise refused
    _raise_another(state.rows, rows, _REFUSED, "refused its arguments", exchange, parent.rank, deadline)
    assert call is not None
    agreed = _agreed_version(rows, parent.rank)
    failure: Exception | None = None
    entries = [] if known is None else known.entries
    if known is None or any(theirs[0] != known.number for theirs in rows.values()):
        state.rows.post(exchange, text or call.text())
        said = {other: decode(state.rows.read(exchange, other, deadline)) for other in state.rows.ranks}
        entries, known = merge(said, parent.rank), None
    digests: dict[tuple[str, int], int] = {}
    versions: dict[str, list[tuple[torch.Tensor, int]]] = {}
    results: list[DTensor] = []
    try:
        if known is None:
            known = _Known(number, entries, _compile(parent, entries, call))
            state.known[call.key()] = known
            while len(state.known) > _KEPT:
                state.known.popitem(last=False)
        versions = {
            name: [(tensor, tensor._version) for tensor in (x, x._local_tensor)]
            for name, x in call.watched().items()
        }
        with torch.no_grad():
            results = _move(known, call, parent.rank, deadline, digests if digest else None)
    except (DeadlineExceededError, PeerLostError, AbortedError):
        raise
    except Exception as error:  # of one rank's tensors: ranks that do not need them have to hear of it
        failure = typed(error, _OP, parent.rank)
    changed = [
        index
        for index, entry in enumerate(entries)
        if any(tensor._version != seen for tensor, seen in versions.get(entry.name, ()))
    ]
    row = [_REFUSED if failure is not None else changed[0] if changed else _NONE]
    if digest:
        row += [digests.get((side, i), 0) for side in ("src", "dst") for i in range(len(entries))]
    rows = state.rows.gather(row, _left(deadline))
    state.rows.forget()
    if failure is not None:
        state.rows.post(f"failed {number}", str(failure))
        raise failure
    _raise_another(
        state.rows, rows, _REFUSED, "could not take part", f"failed {number}", parent.rank, deadline
    )
    _check_whole(entries, rows, parent.rank, digest)
    if agreed != _NONE:
        state.versions[names] = agreed
    resharded = ReshardedState(zip(call.destinations, results, strict=True))
    resharded.version = None if agreed == _NONE else agreed
    return resharded


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


def _raise_another(
    texts: Rows,
    rows: Mapping[int, list[int]],
    mark: int,
    what: str,
    topic: str,
    rank: int,
    deadline: float,
) -> None:
    """Raises where another rank's row has the mark that it raises by itself, with what it says about it."""
    for other, theirs in rows.items():
        if theirs[0] == mark:
            raise PlanMismatchError(
                f"{_OP}: rank {other} {what}: {texts.read(topic, other, deadline)}",
                rank=rank,
                peer=other,
                op=_OP,
                phase="agree",
            )


def _agreed_version(rows: Mapping[int, list[int]], rank: int) -> int:
    """The version that all ranks mean, _NONE without. Raises where they differ or it is old."""
    given = {other: row[1] for other, row in rows.items() if row[1] != _NONE}
    without = [other for other, row in rows.items() if row[3] and row[1] == _NONE]
    last = max(row[2] for row in rows.values())
    text = ""
    if len(set(given.values())) > 1:
        text = "the versions differ: " + ", ".join(f"rank {r} has {v}" for r, v in given.items())
    elif given and without:
        text = f"ranks {sorted(given)} give version {max(given.values())}, but ranks {without}, which hold "
        text += "weights, give none"
    elif given and max(given.values()) <= last:
        text = f"version {max(given.values())} is no newer than {last}, which has arrived before"
    if text:
        raise PlanMismatchError(f"{_OP}: {text}", rank=rank, op=_OP, phase="agree")
    return max(given.values(), default=_NONE)


def _compile(
    parent: ParentGroup, entries: Sequence[Entry], call: StateCall
) -> list[tuple[list[int], Compiled]]:
    """Batches of at most max_bytes_in_flight, in the order of the names, the tensors of each at one pair of
    places."""
    limit = call.options["max_bytes_in_flight"]
    groups: list[tuple[list[int], int]] = []
    for index, entry in enumerate(entries):
        size = checks.total_bytes(entry.shape, wire_dtype(_source(entry, call), entry.result_dtype))
        joins = bool(groups) and entries[groups[-1][0][-1]].device_types == entry.device_types
        if joins and (limit is None or groups[-1][1] + size <= limit):
            groups[-1] = ([*groups[-1][0], index], groups[-1][1] + size)
        else:
            groups.append(([index], size))
    batches = []
    for indices, _ in groups:
        chosen = [entries[i] for i in indices]
        sources = [_source(entry, call) for entry in chosen]
        targets = [
            Destination(
                call.destinations[entry.name].mesh,
                call.destinations[entry.name].placements,
                entry.result_dtype,
            )
            for entry in chosen
        ]
        options = PlanOptions(call.options["strategy"], call.topology)
        batches.append((indices, compile_call(parent, sources, targets, _OP, options, kept=False)))
    return batches


def _source(entry: Entry, call: StateCall) -> Source:
    held = call.held.get(entry.name)
    mesh = None if held is None else held.device_mesh
    # A digest of values that are reduced on the way could not be taken at their source.
    return Source(
        entry.shape,
        entry.dtype,
        entry.src,
        mesh,
        reduce_first=call.options["digest"],
        device_type=entry.device_types[0],
    )


def _move(
    known: _Known, call: StateCall, rank: int, deadline: float, digests: dict[tuple[str, int], int] | None
) -> list[DTensor]:
    """Runs the batches, one after the other. Where one fails here, the ranks of the others hear of it."""
    results: dict[int, DTensor] = {}
    begun = 0
    try:
        sent = call.sent()
        for indices, compiled in known.batches:
            names = [known.entries[i].name for i in indices]
            xs = [sent.get(name) for name in names]
            outs = [call.outs.get(name) for name in names]
            observe = None if digests is None else _observer(indices, compiled, rank, digests)
            moved, launch = compiled.begin(xs, _left(deadline), outs, observe)
            begun += 1
            if launch is not None:
                launch.wait()
                if known.entries[indices[0]].device_types != ("cpu", "cpu"):
                    _end_on_gpu(launch, deadline)
            for position, index in enumerate(indices):
                results[index] = moved[position]
                move = compiled.moves[position]
                if digests is not None and move.local_shape is not None:
                    local = moved[position]._local_tensor.to(move.wire_dtype)
                    layout = compiled.problems[position][3]
                    digests["dst", index] = shard_digest(local, layout, move.shape, rank)
    except Exception as error:
        for _, compiled in known.batches[begun + was_told(error) :]:
            if compiled.transfer is not None:
                compiled.transfer._group.refuse(0, typed(error, _OP, rank), _left(deadline))
        raise
    return [results[index] for index in range(len(known.entries))]


def _end_on_gpu(call: Call, deadline: float) -> None:
    """Blocks until the GPU is through as well: what fails there must be known before any rank returns."""
    begin = time.monotonic()
    while not call.is_completed():
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"{_OP}: the GPU was not through with what arrived by the limit of the call",
                op=_OP,
                phase="transfer",
                elapsed=time.monotonic() - begin,
            )
        time.sleep(_PAUSE)
    call.wait()  # raises what failed meanwhile


def _observer(
    indices: Sequence[int], compiled: Compiled, rank: int, digests: dict[tuple[str, int], int]
) -> Callable[[int, torch.Tensor], None]:
    """Takes the digest of each shard that leaves this rank."""

    def observe(position: int, shard: torch.Tensor) -> None:
        layout, shape = compiled.problems[position][2], compiled.moves[position].shape
        digests["src", indices[position]] = shard_digest(shard, layout, shape, rank)

    return observe


def _check_whole(entries: Sequence[Entry], rows: Mapping[int, list[int]], rank: int, digest: bool) -> None:
    """Raises unless every holder's weights stayed as they were, and, with digests, arrived as they were."""
    for other, row in rows.items():
        if row[0] != _NONE:
            raise _torn(
                f"rank {other} changed {entries[row[0]].name!r} in place while it travelled; let the call "
                "return before the next optimiser step",
                rank,
                other,
            )
    if not digest:
        return
    for index, entry in enumerate(entries):
        sent = _total(entry, entry.src, "source", {r: row[1 + index] for r, row in rows.items()}, rank)
        arrived = _total(
            entry, entry.dst, "result", {r: row[1 + len(entries) + index] for r, row in rows.items()}, rank
        )
        if sent != arrived:
            raise _torn(f"{entry.name!r} did not arrive as it was sent: the digests differ", rank, None)


def _total(entry: Entry, layout: Layout, what: str, digests: Mapping[int, int], rank: int) -> int:
    """The digest of the whole tensor, once the replicas of each shard agree."""
    first: dict[Any, int] = {}
    for owner, boxes in layout.shards(entry.shape).items():
        same = first.setdefault(tuple(boxes), owner)
        if digests[same] != digests[owner]:
            raise _torn(
                f"the replicas of {entry.name!r} on ranks {same} and {owner} differ ({what})", rank, owner
            )
    return sum(digests[owner] for owner in first.values()) % (1 << 64)


def _torn(text: str, rank: int, peer: int | None) -> MeshcastError:
    return MeshcastError(f"{_OP}: {text}", rank=rank, peer=peer, op=_OP, phase="transfer")
