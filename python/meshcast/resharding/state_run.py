"""One call of reshard_state_dict, from what this rank was given to what it returns.

It has three parts. In the first round every rank says which version it has and whether it knows the tensors;
if one does not, all read what each holds and wants in the rendezvous store, once. Then the tensors travel. In
the last round the holders say whether their weights stayed unchanged meanwhile: only then does any rank
return them. All ranks see all rows, hence all raise the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..base import checks
from ..errors import LayoutError, PlanMismatchError
from ..groups.parent import ParentGroup
from ..layout import Layout
from ..transfers.call import Call
from .state_arguments import Given, StateCall, checked_call
from .state_batches import compile_batches
from .state_digests import Digests, check_whole
from .state_entries import local_of
from .state_kept import Kept, Known
from .state_moves import agree
from .state_results import Memory, ReshardedState, arriving, fill, note_outputs
from .state_rows import Rows
from .state_specs import OP, decode, mismatch

__all__ = ["Conversation", "Prepared", "conversation"]

_NONE = -1  # in a row: no version, nothing known
_REFUSED = -2
_NO_VALUES: dict[str, Any] = {}


class Prepared:
    """This rank's side of a call, checked at the call; `refused` where that found something wrong. versions:
    of tensors that travel, as they were at the call."""

    def __init__(
        self,
        rank: int,
        given: Given,
        version: Any,
        again: tuple[StateCall, Any] | None = None,
        written: Sequence[torch.Tensor] = (),
    ) -> None:
        """again: a call that has been checked, and its key. written: tensors beside the outputs that the call
        writes to."""
        self.refused: LayoutError | None = None
        self.call: StateCall | None = None
        self.key: Any = None
        self.version = _NONE
        self.versions: dict[str, list[tuple[torch.Tensor, int]]] = {}
        try:
            self.version = _version(version)
            call = checked_call(rank, given) if again is None else again[0]
            key = call.key() if again is None else again[1]
            hash(key)  # here, where it is refused, and not where it is looked for
            self.call, self.key = call, key
            self.versions = call.watched(written)
        except LayoutError as error:
            self.refused = error
        except TypeError as error:
            self.refused = LayoutError(f"{OP}: an argument cannot be used: {error}", rank=rank, op=OP)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What versions are counted by."""
        call = self.call
        return ((), ()) if call is None else (tuple(call.wanted), tuple(call.held))


def _version(version: Any) -> int:
    return _NONE if version is None else checks.integer(f"{OP}: version", version, 0, (1 << 62) - 1)


class Conversation:
    """What a process group keeps for its calls. versions: the last that arrived, by the names of tensors."""

    def __init__(self, parent: ParentGroup, versions: dict[Any, int]) -> None:
        self.parent = parent
        self.rows = Rows(parent)
        self.calls = 0
        self.versions = versions
        self.kept = Kept()

    @torch.no_grad()
    def run(
        self,
        prepared: Prepared,
        deadline: float,
        result: ReshardedState,
        known: Known | None = None,
        memory: Memory | None = None,
        moving: Callable[[], None] = lambda: None,
    ) -> tuple[Known, list[Call]]:
        """Fills `result`. known: the kind of call, where the caller has kept it. memory: to arrive in, in
        place of new one. moving(): called once nobody has anything to refuse, before the first byte is
        written. Returns the kind and the transfers that were made."""
        rank, rows = self.parent.rank, self.rows
        self.calls += 1
        rows.connect(_left(deadline))
        call = prepared.call
        if call is not None and known is None:
            known = self.kept.get(prepared.key)
        exchange = f"specs {self.calls}"
        changed_values = False
        if prepared.refused is not None:
            rows.post(exchange, str(prepared.refused))
        elif call is not None and known is None:
            rows.post(exchange, call.text())
        elif call is not None and known is not None:
            changed_values = known.values.get(rank, _NO_VALUES) != call.values
            if changed_values:
                rows.post(f"values {self.calls}", json.dumps(call.values))
        row = [
            _REFUSED if prepared.refused is not None else _NONE if known is None else known.number,
            prepared.version,
            self.versions.get(prepared.names, _NONE),
            int(call is not None and bool(call.tensors)),
            int(changed_values),
        ]
        said = rows.gather(row, _left(deadline))
        self._raise_refusals(prepared, said, exchange, deadline)
        assert call is not None
        version = _agreed_version(said, rank)
        if known is None or any(theirs[0] != known.number for theirs in said.values()):
            if known is not None:
                rows.post(exchange, call.text())
            known = self._compiled(call, exchange, deadline)
        else:
            for other, theirs in said.items():
                if theirs[4]:
                    known.values[other] = json.loads(rows.read(f"values {self.calls}", other, deadline))
        values = _merged(known.values, rank)
        moving()
        reused = None if memory is None else memory.fitting(known.agreed.targets)
        arrived = reused or arriving(call, known.agreed.targets, rank)
        digests = Digests(rank, len(known.parts)) if call.options["digest"] else None
        observe = None if digests is None else digests.observe
        written = [*map(local_of, call.outs.values()), *(reused or {}).values()]
        sent = call.sent(written)
        if reused is not None:
            reused.update(arrived)
        made = [batch.run(sent, arrived, deadline, observe) for batch in known.batches]
        self.kept.add(prepared.key, known)
        changed = [
            number
            for number, name in enumerate(known.sources)
            if any(tensor._version != seen for tensor, seen in prepared.versions.get(name, ()))
        ]
        last = [changed[0] if changed else _NONE, *([] if digests is None else digests.row())]
        ended = rows.gather(last, _left(deadline))
        rows.forget()
        note_outputs(call)
        check_whole(known.parts, known.sources, ended, rank, digests is not None)
        if version != _NONE:
            self.versions[prepared.names] = version
        fill(result, call, known.agreed.targets, arrived, values)
        result.version = None if version == _NONE else version
        return known, [each for each in made if each is not None]

    def _raise_refusals(
        self, prepared: Prepared, said: Mapping[int, list[int]], exchange: str, deadline: float
    ) -> None:
        for other, theirs in said.items():
            if theirs[0] == _REFUSED:
                if prepared.refused is not None:
                    raise prepared.refused
                raise PlanMismatchError(
                    f"{OP}: rank {other} refused its arguments: {self.rows.read(exchange, other, deadline)}",
                    rank=self.parent.rank,
                    peer=other,
                    op=OP,
                    phase="agree",
                )

    def _compiled(self, call: StateCall, exchange: str, deadline: float) -> Known:
        layouts: dict[Layout, Layout] = {}
        sides = {
            other: decode(self.rows.read(exchange, other, deadline), layouts) for other in self.rows.ranks
        }
        agreed = agree(sides, call.maps, self.parent.rank)
        _merged({other: side.carried for other, side in sides.items()}, self.parent.rank)
        batches = compile_batches(self.parent, agreed, call)
        return Known(self.calls, agreed, batches, {other: side.carried for other, side in sides.items()})


def conversation(parent: ParentGroup) -> Conversation:
    """That of a process group, made at its first call."""
    found: Conversation | None = parent.extras.get(OP)
    if found is None:
        found = parent.extras[OP] = Conversation(parent, {})
    return found


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


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
        raise mismatch(text, rank)
    return max(given.values(), default=_NONE)


def _merged(values: Mapping[int, Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """The entries that are no tensors, which all ranks that have one have alike."""
    found: dict[str, tuple[int, Any]] = {}
    for other in sorted(values):
        for name, value in values[other].items():
            first, earlier = found.setdefault(name, (other, value))
            if earlier != value:
                raise mismatch(
                    f"{name!r} is {checks.shown(earlier)} on rank {first}, but {checks.shown(value)} on rank "
                    f"{other}",
                    rank,
                )
    return {name: value for name, (_, value) in found.items()}
