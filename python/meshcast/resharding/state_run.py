"""One call of reshard_state_dict among all ranks, from the checked arguments of this one to its results.

It has three parts. In the first round every rank says which version it has and whether it knows the tensors;
if one does not, all read what each holds and wants in the rendezvous store, once. Then the tensors travel. In
the last round the holders say whether their weights stayed unchanged meanwhile: only then does any rank
return them. All ranks see all rows, hence all raise the same.

Calls that run concurrently with their caller do so one after the other. They have private groups of their
own, so that they need no order with other calls of the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..base import checks
from ..base.values import carried, is_carried, restored, same_values, shown
from ..base.wire import pack, text_digest, unpack
from ..errors import (
    AbortedError,
    Caller,
    DeadlineExceededError,
    LayoutError,
    MeshcastError,
    PeerLostError,
    was_reported,
)
from ..groups.parent import ParentGroup
from ..layout import Layout
from ..transfers.digest import shard_digest, values_digest
from ..transfers.handle import Handle
from ..transfers.medium import fresh
from ..transfers.transfer import Call
from .compiled import as_dtensor, copied, tensor_spec
from .memory import note_written
from .meshes import positive_placements, scales_layout
from .rows import Rounds, Rows, left
from .state_arguments import Given, StateCall, checked_call, read_state, receiving
from .state_background import Queue, Work
from .state_batches import Batch, Digests, Kept, Known, check_twins, check_whole
from .state_entries import (
    OP,
    Memory,
    ReshardedState,
    StateSide,
    Target,
    local_of,
    mismatch,
    recorded_name,
    same_memory,
)
from .state_moves import agree
from .state_quantize import Blocks

if TYPE_CHECKING:
    pass

__all__ = [
    "Conversation",
    "Memory",
    "Repeated",
    "ReshardedState",
    "StateRun",
    "beside",
    "conversation",
    "likeness",
    "started",
]


_Values = dict[str, str]


def _arriving(call: StateCall, targets: dict[str, Target], rank: int) -> dict[str, torch.Tensor]:
    """The local tensor that each target arrives in, on ranks inside: of an output, or new."""
    found = {}
    shapes: dict[Any, tuple[int, ...] | None] = {}
    for name, target in targets.items():
        if target.alias is not None or target.recorded:
            continue
        out = call.outs.get(name)
        if out is not None:
            found[name] = local_of(out)
            continue
        key = (target.layout, target.shape)
        if key not in shapes:
            inside = rank in target.layout.ranks
            shapes[key] = target.layout.local_shapes(target.shape)[rank] if inside else None
        shape = shapes[key]
        if shape is not None:
            found[name] = _empty(shape, target.dtype, target.device_type)
    return found


def _empty(shape: Sequence[int], dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """Memory that a target arrives in. A rank without GPU may be outside a mesh on GPUs, where it makes
    shells."""
    device = "cuda" if device_type == "cuda" and torch.cuda.is_available() else None
    return fresh(shape, dtype, device)


def _wrapped(
    call: StateCall, target: Target, local: torch.Tensor | None, specs: dict[Any, DTensorSpec]
) -> torch.Tensor:
    """The result around what arrived. specs: those made before; a copy costs a tenth."""
    shape, beside = target.shape, target.beside
    if local is None:  # outside: no elements, but the number of dimensions
        local = _empty((0,) * len(shape), target.dtype, target.device_type)
        if not shape:
            local.zero_()
    name = target.name if beside is None else beside[0]
    if name not in call.meshes:
        return local
    mesh, placements = call.meshes[name]
    key = (mesh, placements, shape, target.dtype, None if beside is None else beside[1:])
    if key in specs:
        return as_dtensor(local, copy(specs[key]))
    if beside is None:
        layout = Layout(mesh, positive_placements(placements, len(shape)))
    elif not beside[2]:
        layout = Layout(mesh, [Replicate()] * mesh.ndim)
    else:
        values = Layout(mesh, positive_placements(placements, len(shape)))
        layout = scales_layout(values, beside[1], beside[2])
    spec = specs[key] = tensor_spec(mesh, layout, shape, target.dtype)
    return as_dtensor(local, spec)


_NONE = -1  # in a row: no version, nothing known


class StateRun:
    """One call on this rank: its arguments, checked at the call, and what becomes of it.

    Attributes:
        refused: what is wrong with the arguments.
        result: filled at the end.
        served, received: as in Agreed. offers: what this rank can serve to readers of what it has received;
            None where it may be other values by now.
        batches, made: of its transfers, and the calls of those that have begun.
        moving: called once no rank has anything to refuse, before the first byte is written.
        still: asked at the end, whether the tensors are what they were meant to be, as watching cannot say.
        earlier: what this rank keeps of the version before, where versions travel as their changes.
    """

    def __init__(
        self,
        rank: int,
        given: Given,
        version: Any = None,
        *,
        op: str = OP,
        again: tuple[StateCall, Any] | None = None,
        memory: Memory | None = None,
        wrong: Exception | None = None,
    ) -> None:
        """op: the public name of the call, which its errors get. again: a call that has been checked, and its
        key. memory: that it arrives in. wrong: what was found wrong before."""
        self.rank = rank
        self.caller = Caller(op, rank)
        self.refused: Exception | None = None
        self.call: StateCall | None = None
        self.key: Any = None
        self.version = _NONE
        self.memory = memory
        self.kept: dict[int, Known] = {}  # by conversation, left by earlier calls of this kind
        self.result = ReshardedState()
        self.served: dict[str, Target] = {}
        self.received: dict[str, Target] = {}
        self.offers: dict[str, torch.Tensor] | None = None
        self._intact = True  # no loader has changed what it was given
        self.batches: Sequence[Batch] = ()
        self.made: list[Call] = []
        self.moving: Callable[[], None] = lambda: None
        self.still: Callable[[], bool] = lambda: True
        self.earlier: Any = None  # an Earlier of WeightSync
        self.rounds: Rounds  # with the other ranks, once it runs
        self._versions: dict[str, list[tuple[torch.Tensor, int]]] = {}  # of tensors, as they were at the call
        self._digests: dict[str, int] = {}
        try:
            if wrong is not None:
                raise wrong
            if version is not None:
                self.version = checks.integer("version", version, 0, (1 << 62) - 1)
            call = checked_call(rank, given) if again is None else again[0]
            self.key = call.key() if again is None else again[1]
            hash(self.key)  # here, where it is refused, and not where it is looked for
            written = {} if memory is None else memory.of(self.key)
            self._versions = call.watched(list(written.values()))
            self.call = call
        except Exception as error:
            self.refused = self.typed(error)

    @property
    def checked(self) -> StateCall:
        """The arguments, which were not refused."""
        assert self.call is not None
        return self.call

    def typed(self, error: Exception) -> Exception:
        """Returns the error that the call raises where `error` came up: one of the operation that it is for.
        What that says of other ranks' calls is of the whole operation."""
        op = self.caller.op
        if op != OP and isinstance(error, MeshcastError) and error.op == OP:
            text = str(error).replace(OP, op, 1).replace(OP, op.partition(".")[0])
            error.args, error.op = (text, *error.args[1:]), op
        return self.caller.typed(error)

    @torch.no_grad()
    def keep_copies(self) -> None:
        """Sends what the tensors hold now, whatever becomes of them."""
        if self.call is not None:
            copies = {name: copied(x) for name, x in self.call.tensors.items()}
            self.call, self._versions = replace(self.call, tensors=copies), {}

    def keep_digests(self) -> None:
        """Keeps digests of what the tensors hold now, where the call compares digests: it begins later."""
        if self.call is not None and self.call.side.options.digest:
            self._digests = self._digests_now(self._versions)

    def changed(self, names: Sequence[str]) -> list[int]:
        """Returns the positions of the names whose tensors are not as they were at the call."""
        if not self.still():
            return list(range(len(names)))
        now = self._digests_now(self._digests)
        return [
            index
            for index, name in enumerate(names)
            if any(tensor._version != seen for tensor, seen in self._versions.get(name, ()))
            or now.get(name) != self._digests.get(name)
        ]

    def _digests_now(self, names: Iterable[str]) -> dict[str, int]:
        return {name: values_digest(local_of(self.checked.tensors[name])) for name in names}

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that versions are counted by."""
        call = self.call
        return ((), ()) if call is None else (tuple(call.side.wanted), tuple(call.side.held))

    def begin(self, batches: Sequence[Batch]) -> None:
        """Notes what is about to be moved, of which nothing has been."""
        for batch in batches:
            batch.wait_for_turn()
        self.batches = batches

    def memory_for(self, targets: dict[str, Target]) -> tuple[dict[str, torch.Tensor], Any]:
        """Returns the local tensors that this rank sends, by source, and those that targets arrive in."""
        call = self.checked
        reused = {} if self.memory is None else self.memory.fitting(self.key, targets)
        landings = {recorded_name(name): x for name, x in call.memory.items()}
        arriving = {**(reused or _arriving(call, targets, self.rank)), **landings}
        sent = call.sent([*map(local_of, call.outs.values()), *landings.values(), *reused.values()])
        if self.memory is not None:
            reused.update(arriving)
        return sent, arriving

    def finish(self, targets: dict[str, Target], arrived: dict[str, torch.Tensor]) -> None:
        """Ends the call on this rank where a loader has a part in it."""
        call = self.checked
        if call.recorded is not None:
            whole = {name: arrived[targets[name].alias or name] for name in call.side.wanted}
            seen = {name: x._version for name, x in whole.items() if not x.is_inference()}
            call.recorded._finish(call.memory, whole)
            # The loader may change what it is given: it is no version then.
            self._intact = all(whole[name]._version == version for name, version in seen.items())
            if self.earlier is not None:
                self.earlier.spoilt = not self._intact

    def fill(self, known: Known, arrived: dict[str, torch.Tensor], values: dict[str, Any]) -> ReshardedState:
        """Puts into `result` what this rank asked for. Tied targets are one tensor, as at the source."""
        call, targets, result = self.checked, known.agreed.targets, self.result
        self.served, self.received = known.agreed.served, known.agreed.received
        if call.recorded is not None:
            result.update({**call.recorded._results(), **values})
            if self._intact and not call.recorded.processed:
                self.offers = self._recorded_offers(arrived)
            return result
        specs: dict[Any, DTensorSpec] = {}
        names = {}
        for name in call.side.wanted:
            names.update(dict.fromkeys((name, *(targets[name].scales if name in targets else ()))))
        for name in names:
            target = targets.get(name)
            if target is None:
                result[name] = values[name]
                continue
            alias = target.alias or name
            if name in call.outs:
                result[name] = call.outs[name]
            elif alias in result and call.meshes.get(name) == call.meshes.get(alias):
                result[name] = result[alias]
            else:
                result[name] = _wrapped(call, target, arrived.get(alias), specs)
        for name, value in values.items():
            result.setdefault(name, value)
        self.offers = {name: x for name, x in result.items() if name in self.received}
        return result

    def _recorded_offers(self, arrived: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, target in self.received.items():
            x = arrived.get(target.alias or name)
            if x is not None and (not target.spans or self.rank in target.spans):
                found[name] = x.narrow(0, *target.spans[self.rank]) if target.spans else x
        return found


class _Row(NamedTuple):
    """The facts that a rank sends in the first round. state: REFUSED, _NONE, or the number of the kind of
    call that it knows. last: the version that arrived before. holds: whether it holds tensors; values:
    whether its values that are no tensors are others than in the last call. low, high: digest of its side,
    zeros where it knows the kind."""

    state: int
    version: int
    last: int
    holds: int
    values: int
    low: int
    high: int


class Conversation:
    """The data that a process group keeps for its calls. versions: the last that arrived, by names of
    tensors."""

    def __init__(self, parent: ParentGroup, versions: dict[Any, int], lost: Collection[int] = ()) -> None:
        """lost: ranks that make no call any longer."""
        self.parent = parent
        self.rows = Rows(parent, lost)
        self.versions = versions
        self.kept = Kept()

    def run(self, run: StateRun, deadline: float) -> ReshardedState:
        """Makes the call with the other ranks, and returns its result. deadline: by time.monotonic()."""
        try:
            return self._run(run, deadline)
        except MeshcastError as error:
            run.typed(error)
            raise

    @torch.no_grad()
    def _run(self, run: StateRun, deadline: float) -> ReshardedState:
        run.rounds = Rounds(self.rows, deadline)
        known, text, rows = self._exchange(run)
        version = _agreed_version(rows)
        known = self._agree(run, known, text, rows)
        call, agreed = run.checked, known.agreed
        merged = _merged(known.values, agreed.own)
        self._compare_twins(run, known)
        blocks = self._agree_on_blocks(run, known)
        delta = self._agree_on_delta(run, known)
        run.moving()
        digests = Digests(self.parent.rank, agreed.moves) if call.side.options.digest else None
        values: dict[str, Any] = {}
        arriving: dict[str, torch.Tensor] = {}
        failure: Exception | None = None
        batches: Sequence[Batch] = ()
        done = 0
        try:
            if delta is None:
                known.compile(self.parent, call.side.options, call.topology, call.tensors)
            batches = known.batches if delta is None else delta.batches(self.parent)
            values = {name: restored(each) for name, each in merged.items()}
            run.begin(batches)
            sent, arriving = run.memory_for(agreed.targets)
            for batch in batches:
                if delta is not None and batch is delta.batch:
                    run.made += delta.run(deadline)
                else:
                    names = {move.source for move in batch.moves}
                    made = {} if blocks is None else blocks.staged(names, sent)
                    run.made += batch.run({**sent, **made}, arriving, deadline, digests)
                done += 1
            if delta is not None:
                delta.finish(sent, arriving, digests)
            run.finish(agreed.targets, arriving)
            self.kept.add(run.key, known)
        except (DeadlineExceededError, PeerLostError, AbortedError):
            self._note_written(run)
            raise
        except Exception as error:  # of one rank's tensors: ranks that do not need them have to learn of it
            failure = run.typed(error)
            for batch in batches[done + was_reported(error) :]:
                batch.refuse(failure, left(deadline))
        self._end(run, known, failure, digests)
        if version is not None:
            self.versions[run.names] = run.result.version = version
            if run.earlier is not None:
                run.earlier.keep(known, version, arriving)
        run.kept[id(self)] = known
        return run.fill(known, arriving, values)

    def _exchange(self, run: StateRun) -> tuple[Known | None, str, dict[int, _Row]]:
        """The first round. Returns the kind of call, where this rank knows it, else its side as text, and
        what all ranks say."""
        call, known, text, changed = run.call, None, "", False
        if call is not None:
            known = run.kept.get(id(self)) or self.kept.get(run.key)
            if known is None:
                text = pack(call.side)
            else:
                changed = known.values.get(self.parent.rank, {}) != call.side.carried
        row = _Row(
            _NONE if known is None else known.number,
            run.version,
            self.versions.get(run.names, _NONE),
            int(call is not None and bool(call.tensors)),
            int(changed),
            *text_digest(text),
        )
        rows = self._round(run, "specs", run.refused, row, "refused its arguments")
        return known, text, {rank: _Row(*each) for rank, each in rows.items()}

    def _agree(self, run: StateRun, known: Known | None, text: str, rows: Mapping[int, _Row]) -> Known:
        """Returns what is known of this kind of call on all ranks, with the values of this call; else what
        follows from the sides of all ranks. The same on all, or the same error."""
        side, rounds = run.checked.side, run.rounds
        if known is not None and all(row.state == known.number for row in rows.values()):
            speakers: dict[int, Any] = {rank: rank for rank, row in rows.items() if row.values}
            changed, _ = rounds.texts("values", lambda: pack(side.carried, _Values), speakers)
            known.values.update({rank: unpack(_Values, theirs) for rank, theirs in changed.items()})
            return known
        # One that knew the kind of call has sent no digest.
        speakers = {rank: (row.low, row.high) if row.low or row.high else rank for rank, row in rows.items()}
        texts, spoke = rounds.texts("specs", lambda: text or pack(side), speakers)
        same: dict[Any, Any] = {}
        read = {rank: unpack(StateSide, texts[rank], same) for rank in sorted(texts)}
        sides = {rank: read[spoke[rank]] for rank in rows}
        return Known(rounds.number, agree(sides), {rank: each.carried for rank, each in sides.items()})

    def _compare_twins(self, run: StateRun, known: Known) -> None:
        """Raises on all ranks where meshes hold different values under one name. Reads each tensor once."""
        twins = known.agreed.twins
        if not twins:
            return
        rank, digests, failure = self.parent.rank, [0] * len(twins), None
        try:
            for at, (name, (shape, layouts)) in enumerate(twins.items()):
                for layout in layouts:
                    if rank in layout.ranks:
                        local = local_of(run.checked.tensors[name])
                        digests[at] = shard_digest(local, layout, shape, rank)
        except Exception as error:  # the others have to learn of it
            failure = run.typed(error)
        rows = self._round(run, "twins", failure, (_NONE, *digests), "could not take part")
        check_twins(known.agreed, {other: each[1:] for other, each in rows.items()})

    def _agree_on_blocks(self, run: StateRun, known: Known) -> Blocks | None:
        """Reads what is quantised on the way, and makes the largest magnitudes of its blocks those of the
        whole tensors; calls functions of the user. None where nothing is. Raises on all ranks where one can
        make no scales, before anything moves."""
        if not known.agreed.quantized:
            return None
        call, blocks, failure, done = run.checked, None, None, False
        try:
            batch = known.before(self.parent, call.side.options, call.topology)
            try:
                sources = call.sent(())
                blocks = Blocks(self.parent.rank, known.agreed.quantized, sources, call.quantizing)
                if batch is not None:
                    done = True
                    run.made += batch.run(blocks.sent, blocks.arriving, run.rounds.deadline, None)
            except Exception as error:
                if batch is not None and not done:
                    batch.refuse(run.typed(error), left(run.rounds.deadline))
                raise
            blocks.settle(sources)
        except (DeadlineExceededError, PeerLostError, AbortedError):
            raise
        except Exception as error:  # the others have to learn of it
            failure = run.typed(error)
        self._round(run, "blocks", failure, (_NONE,), "could not quantise")
        return blocks

    def _agree_on_delta(self, run: StateRun, known: Known) -> Any:
        """Finds what has changed since the version before. None where this version travels whole."""
        if run.earlier is None:
            return None
        failure: Exception | None = None
        delta = run.earlier.delta(known, self.parent.rank, run.checked)
        row = [_NONE] * delta.row_length
        try:
            row = delta.compare()
        except Exception as error:  # the others have to learn of it
            failure = run.typed(error)
        rows = self._round(run, "changes", failure, (_NONE, *row), "could not compare its weights")
        return delta if delta.settle({rank: each[1:] for rank, each in rows.items()}) else None

    def _end(self, run: StateRun, known: Known, failure: Exception | None, digests: Digests | None) -> None:
        """The last round. Raises on all ranks unless everything arrived as it was sent."""
        changed = run.changed(known.agreed.sources)
        row = (changed[0] if changed else _NONE, *(() if digests is None else digests.row()))
        self._note_written(run)
        rows = self._round(run, "failed", failure, row, "could not take part", last=True)
        check_whole(known.agreed, rows, digests is not None)

    def _note_written(self, run: StateRun) -> None:
        """Counts the writes of the call, whatever becomes of it: autograd and later versions have to know."""
        for out in run.checked.outs.values():
            note_written(*([out, out._local_tensor] if isinstance(out, DTensor) else [out]))
        note_written(*run.checked.memory.values())

    def _round(
        self,
        run: StateRun,
        topic: str,
        failure: Exception | None,
        row: Sequence[int],
        what: str,
        *,
        last: bool = False,
    ) -> dict[int, list[int]]:
        return run.rounds.gather(topic, failure, row, what, last=last)


def conversation(parent: ParentGroup, lost: Collection[int] = ()) -> Conversation:
    """Returns the conversation of a process group without its lost ranks, made at its first call."""
    without = sorted(parent.ranks.intersection(lost))
    key = f"{OP} without {without}" if without else OP
    found: Conversation | None = parent.extras.get(key)
    if found is None:
        found = parent.extras[key] = Conversation(parent, {}, without)
    return found


def _agreed_version(rows: Mapping[int, _Row]) -> int | None:
    """Returns the version that all ranks mean. Raises where they differ or it is old."""
    given = {rank: row.version for rank, row in rows.items() if row.version != _NONE}
    without = [rank for rank, row in rows.items() if row.holds and row.version == _NONE]
    last = max(row.last for row in rows.values())
    if not given:
        return None
    version = max(given.values())
    if len(set(given.values())) > 1:
        each = ", ".join(f"rank {rank} has {theirs}" for rank, theirs in given.items())
        raise mismatch(f"the versions differ: {each}")
    if without:
        raise mismatch(
            f"ranks {sorted(given)} give version {version}, but ranks {without}, which hold weights, give "
            "none"
        )
    if version <= last:
        raise mismatch(f"version {version} is no newer than {last}, which has arrived before")
    return version


def _merged(values: Mapping[int, Mapping[str, str]], own: frozenset[str]) -> dict[str, str]:
    """Returns the entries that are no tensors, as texts, which are the same on all ranks that have one; of a
    rank's own, those of the lowest."""
    found: dict[str, tuple[int, str]] = {}
    for rank in sorted(values):
        for name, value in values[rank].items():
            first, earlier = found.setdefault(name, (rank, value))
            if name not in own and not same_values(earlier, value):
                raise mismatch(
                    f"{name!r} is {shown(earlier)} on rank {first}, but {shown(value)} on rank {rank}"
                )
    return {name: value for name, (_, value) in found.items()}


class Repeated:
    """The calls of one rank that differ in their values alone: what they have in common is checked and
    compiled once. One of another kind than the last is right all the same, and compiled again."""

    def __init__(self, rank: int, given: Given) -> None:
        """given: what all calls have in common; its state and out are not read."""
        self._rank = rank
        self._given = given
        self._call: StateCall | None = None  # the last one of its kind, without its tensors
        self._key: Any = None
        self._like: Any = None  # of its entries, by their names in the state_dict
        self._outs: dict[str, Any] = {}
        self._into: dict[str, Any] = {}  # outputs among the destinations
        self._kept: dict[int, Known] = {}  # by conversation: concurrent calls have their own

    def prepared(
        self,
        state: Any,
        out: Any,
        version: Any,
        memory: Memory | None,
        wrong: Exception | None = None,
        op: str = OP,
    ) -> StateRun:
        """Returns one call, checked. memory: that it will arrive in. wrong: what was found wrong before. op:
        the public name of the call."""
        if wrong is None:
            try:
                state = read_state(state, self._rank)
            except Exception as error:
                wrong = error
        given = replace(self._given, state=state, out=out)
        call = self._again(state, out) if wrong is None else None
        again = None if call is None else (call, self._key)
        run = StateRun(self._rank, given, version, op=op, again=again, memory=memory, wrong=wrong)
        if run.call is not None and again is None:
            self._key, self._kept = run.key, {}
            # Weights that it has sent do not concern it any longer.
            self._call = replace(run.call, tensors={}, outs={}, memory={})
            self._like = _likenesses(state or {})
            self._outs = {name: _place(x) for name, x in run.call.outs.items()}
            self._into = receiving(self._given.destinations, None)[1]
        run.kept = self._kept
        return run

    def _again(self, state: Any, out: Any) -> StateCall | None:
        """The last call with other tensors; None where it is of another kind."""
        call = self._call
        if call is None or not isinstance(state or {}, Mapping) or not isinstance(out or {}, Mapping):
            return None
        state, side = state or {}, call.side
        outs = {**self._into, **receiving(None, out)[1]}
        if self._given.only is None and not outs.keys() <= side.wanted.keys():
            return None
        outs = {name: x for name, x in outs.items() if name in side.wanted}
        tensors = {old: x for old, x in state.items() if not is_carried(x)}
        if _likenesses(state) != self._like:
            return None
        if {name: _place(x) for name, x in outs.items()} != self._outs:
            return None
        names = {old: name for name, old in call.keys.items()}
        sent = {names[old]: x for old, x in tensors.items() if names.get(old) in call.here}
        values = {names[old]: carried(x) for old, x in state.items() if old in names and is_carried(x)}
        if values.keys() != side.carried.keys() or same_memory(sent.items()) != side.ties:
            return None
        try:
            memory = {} if call.recorded is None else call.recorded._memory()
        except LayoutError:
            return None
        return replace(call, side=side._replace(carried=values), tensors=sent, outs=outs, memory=memory)


def _likenesses(state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Equal for states of the same description, a WeightSource's with the layouts of its shards."""
    entries = {old: likeness(x) for old, x in state.items() if not is_carried(x)}
    return entries, getattr(state, "layouts", None)


def likeness(x: Any) -> Any:
    """Equal for entries with the same description."""
    if isinstance(x, DTensor):
        return x._spec
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return x  # a spec, which is equal to itself alone, or what is refused


def _place(x: Any) -> Any:
    """Equal for outputs that are one piece of memory."""
    if not isinstance(x, torch.Tensor):
        return x
    local = local_of(x)
    return likeness(x), local.data_ptr(), local.shape, local.stride()


_QUEUE = "background reshard_state_dict"


def beside(parent: ParentGroup, lost: Collection[int] = ()) -> Conversation:
    """The conversation of the calls that run concurrently with others. Versions are those of the process
    group."""
    talk = conversation(parent.twin(OP), lost)
    talk.versions = conversation(parent, lost).versions
    return talk


def started(
    parent: ParentGroup,
    run: StateRun,
    limit: float,
    work: Callable[[Conversation, float], object] | None = None,
    lost: Collection[int] = (),
    copy: bool = False,
) -> Handle[ReshardedState]:
    """Starts a call. limit: seconds. work: what to do with the deadline instead of Conversation.run alone.
    lost: ranks that make no call any longer. copy: of what is held, at once."""
    if copy:
        run.keep_copies()
    run.keep_digests()
    talk = beside(parent, lost)
    queue: Queue = talk.parent.extras.setdefault(_QUEUE, Queue())
    deadline = time.monotonic() + limit
    bounds: list[float] = []

    def step() -> None:
        if work is None:
            talk.run(run, deadline)
        else:
            work(talk, deadline)
        bounds.extend(batch.bound() for batch in run.batches)

    begun = Work(step, run.made)
    queue.put(begun)
    return Handle(begun, run.result, lambda: sum(bounds))
