"""One call of reshard_state_dict, from what this rank was given to what it returns.

It has three parts. In the first round every rank says which version it has and whether it knows the tensors;
if one does not, all read what each holds and wants in the rendezvous store, once. Then the tensors travel. In
the last round the holders say whether their weights stayed unchanged meanwhile: only then does any rank
return them. All ranks see all rows, hence all raise the same.

Calls of reshard_state_dict that run beside their caller, one after the other.

They have private groups of their own, so that they need no order with other calls of the process group.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..base import checks
from ..base.values import restored, same_values, shown
from ..errors import AbortedError, Caller, DeadlineExceededError, PeerLostError, PlanMismatchError, was_told
from ..groups.parent import ParentGroup
from ..groups.store import within
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.digest import shard_digest, values_digest
from ..transfers.handle import Handle, Unordered, call_back
from ..transfers.transfer import Call, kept_transfer
from .memory import as_dtensor, copied, note_written
from .meshes import positive_placements
from .state_arguments import Given, StateCall, checked_call
from .state_batches import Batch, Digests, Kept, Known, check_twins, check_whole, compile_batches
from .state_entries import OP, decode, local_of, mismatch, text_digest
from .state_moves import Agreed, Origin, Target, agree

if TYPE_CHECKING:
    from ..groups.private import PrivateGroup

__all__ = [
    "Conversation",
    "Memory",
    "Prepared",
    "ReshardedState",
    "Rows",
    "arriving",
    "behind",
    "beside",
    "conversation",
    "fill",
    "note_outputs",
    "own_stream",
    "started",
]


_T = TypeVar("_T")
_OP = "reshard_state_dict"
_GRACE = 1.0  # seconds that the store is given beyond the limit of a call


class Rows:
    """The conversation of one group of ranks. All ranks make the same calls in one order."""

    def __init__(self, parent: ParentGroup, lost: Collection[int] = ()) -> None:
        """lost: ranks that make no call any more."""
        self._parent = parent
        self.ranks = sorted(parent.ranks.difference(lost))
        self._group: PrivateGroup = parent.private(self.ranks, _OP)
        self._rows = Layout(self.ranks, [Shard(0)])
        self._all = Layout(self.ranks, [Replicate()])
        self._posted: list[str] = []

    def number(self) -> int:
        """Returns the number of the next gathering, the same on all ranks."""
        return self._group.next_ordinal(0)

    def gather(self, row: Sequence[int], limit: float) -> dict[int, list[int]]:
        """Every rank's row, all of one length."""
        shape = (len(self.ranks), len(row))
        transfer = kept_transfer(self._parent, [Problem(shape, torch.int64, self._rows, self._all)], _OP)
        mine = torch.tensor([list(row)], dtype=torch.int64)
        rows = torch.empty(shape, dtype=torch.int64)
        transfer.launch([mine], [rows], limit, driven=True).wait()
        return dict(zip(self.ranks, rows.tolist(), strict=True))

    def post(self, topic: str, text: str, deadline: float) -> None:
        """deadline: by time.monotonic(); that of the call, as everywhere here."""
        self._posted.append(topic)
        self._ask(lambda: self._group.conversation.say(topic, text), deadline)

    def read(self, topic: str, ranks: Sequence[int], deadline: float) -> dict[int, str]:
        """Returns what `ranks` have posted, or are about to post."""
        if not ranks:
            return {}
        late = f"{_OP}: rank {{first}} did not say what it holds"
        return self._ask(
            lambda: self._group.conversation.hear(topic, ranks, deadline, late, _OP, "agree"), deadline
        )

    def forget(self, deadline: float) -> None:
        """Deletes what this rank posted. Only after a round that followed the reading of it."""
        for topic in self._posted:
            self._ask(partial(self._group.conversation.forget, topic), deadline)
        self._posted.clear()

    def _ask(self, call: Callable[[], _T], deadline: float) -> _T:
        """call() uses the store, and ends by itself until then where that answers."""
        left = max(deadline - time.monotonic(), 0.0)
        return within(left + _GRACE, call, f"{_OP}, what the ranks hold", rank=self._parent.rank, op=_OP)


class ReshardedState(dict[str, Any]):
    """{name: tensor} in the order of this rank's destinations, then entries that are no tensors."""

    version: int | None = None
    """Version of the weights; None if the holders gave none."""


class Memory:
    """Local tensors that calls arrive in again and again, by target. tensors: those of the last call."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._targets: dict[str, Target] = {}

    def forget(self) -> None:
        """For calls of another kind. A call that is on its way keeps what it has."""
        self.tensors, self._targets = {}, {}

    def fitting(self, targets: dict[str, Target]) -> dict[str, torch.Tensor]:
        """`tensors`, empty where they are of other targets: ranks that hold may come to hold others, of which
        a rank that receives hears in the call itself."""
        if targets is not self._targets and targets != self._targets:
            self.tensors = {}
        self._targets = targets
        return self.tensors


def arriving(call: StateCall, targets: dict[str, Target], rank: int) -> dict[str, torch.Tensor]:
    """The local tensor that each target arrives in, on ranks inside: of an output, or new."""
    found = {}
    shapes: dict[Any, tuple[int, ...] | None] = {}
    for name, target in targets.items():
        if target.alias is not None:
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
            found[name] = empty(shape, target.dtype, target.device_type)
    return found


def empty(shape: Sequence[int], dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """Memory that a target arrives in. A rank without GPU may be outside a mesh on GPUs, where it makes
    shells."""
    device = "cuda" if device_type == "cuda" and torch.cuda.is_available() else None
    return torch.empty(shape, dtype=dtype, device=device)


def fill(
    result: ReshardedState,
    call: StateCall,
    targets: dict[str, Target],
    arrived: dict[str, torch.Tensor],
    values: dict[str, Any],
) -> None:
    """Puts into `result` what this rank asked for. Tied targets are one tensor, as at the source."""
    specs: dict[Any, DTensorSpec] = {}
    for name in call.wanted:
        if name not in targets:
            result[name] = values[name]
        elif name in call.outs:
            result[name] = call.outs[name]
        else:
            target = targets[name]
            twin = result.get(target.alias) if target.alias is not None else None
            if target.alias is not None and _one(call, name, target.alias) and twin is not None:
                result[name] = twin
            else:
                result[name] = _wrapped(call, target, arrived.get(target.alias or name), specs)
    for name, value in values.items():
        if name not in result:
            result[name] = value


def _one(call: StateCall, name: str, alias: str) -> bool:
    """Returns whether two tied results can be one object."""
    return call.meshes.get(name) == call.meshes.get(alias)


def _wrapped(
    call: StateCall, target: Target, local: torch.Tensor | None, specs: dict[Any, DTensorSpec]
) -> torch.Tensor:
    """The result around what arrived. specs: those made before; a copy costs a tenth."""
    shape = target.shape
    if local is None:  # outside: no elements, but the number of dimensions
        local = empty((0,) * len(shape), target.dtype, target.device_type).zero_()
    if target.name not in call.meshes:
        return local
    mesh, placements = call.meshes[target.name]
    key = (mesh, placements, shape, target.dtype)
    if key in specs:
        return as_dtensor(local, copy(specs[key]))
    stride = tuple(math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, target.dtype)
    spec = specs[key] = DTensorSpec(mesh, positive_placements(placements, len(shape)), tensor_meta=meta)
    return as_dtensor(local, spec)


def note_outputs(call: StateCall) -> None:
    """Lets autograd know that the outputs were written."""
    for out in call.outs.values():
        note_written(*([out, out._local_tensor] if isinstance(out, DTensor) else [out]))


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
        wrong: Exception | None = None,
    ) -> None:
        """again: a call that has been checked, and its key. written: tensors beside the outputs that the call
        writes to. wrong: what was found wrong before."""
        self.refused: Exception | None = None
        self.call: StateCall | None = None
        self.key: Any = None
        self.version = _NONE
        self.versions: dict[str, list[tuple[torch.Tensor, int]]] = {}
        try:
            if wrong is not None:
                raise wrong
            self.version = _version(version)
            call = checked_call(rank, given) if again is None else again[0]
            self.call, self.key = call, call.key() if again is None else again[1]
            hash(self.key)  # here, where it is refused, and not where it is looked for
            self.versions = call.watched(written)
        except Exception as error:
            self.refused = Caller(OP, rank).typed(error)
            self.call = None
        self._digests: dict[str, int] = {}

    @torch.no_grad()
    def keep_copies(self) -> None:
        """Sends what the tensors hold now, whatever becomes of them."""
        if self.call is not None:
            copies = {name: copied(x) for name, x in self.call.tensors.items()}
            self.call, self.versions = replace(self.call, tensors=copies), {}

    def keep_digests(self) -> None:
        """Keeps digests of what the tensors hold now, where the call compares digests: it begins later."""
        if self.call is not None and self.call.options["digest"]:
            self._digests = self._digests_now(self.versions)

    def changed(self, names: Sequence[str]) -> list[int]:
        """Positions of the names whose tensors are not as they were at the call."""
        now = self._digests_now(self._digests)
        return [
            index
            for index, name in enumerate(names)
            if any(tensor._version != seen for tensor, seen in self.versions.get(name, ()))
            or now.get(name) != self._digests.get(name)
        ]

    def _digests_now(self, names: Iterable[str]) -> dict[str, int]:
        assert self.call is not None
        return {name: values_digest(local_of(self.call.tensors[name])) for name in names}

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that versions are counted by."""
        call = self.call
        return ((), ()) if call is None else (tuple(call.wanted), tuple(call.held))


def _version(version: Any) -> int:
    return _NONE if version is None else checks.integer(f"{OP}: version", version, 0, (1 << 62) - 1)


class Conversation:
    """The data that a process group keeps for its calls. versions: the last that arrived, by names of
    tensors."""

    def __init__(self, parent: ParentGroup, versions: dict[Any, int], lost: Collection[int] = ()) -> None:
        """lost: ranks that make no call any more."""
        self.parent = parent
        self.rows = Rows(parent, lost)
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
        moves: Callable[[Sequence[Batch]], None] = lambda _: None,
    ) -> tuple[Known, list[Call]]:
        """Fills `result`. known: the kind of call, where the caller has kept it. memory: to arrive in, in
        place of new one. moving(): called once nobody has anything to refuse, before the first byte is
        written. moves(): told what is about to be moved. Returns the kind and the transfers that were made.
        """
        rank, rows = self.parent.rank, self.rows
        call, number = prepared.call, rows.number()
        if call is not None and known is None:
            known = self.kept.get(prepared.key)
        exchange = f"specs {number}"
        changed_values = (
            call is not None and known is not None and known.values.get(rank, _NO_VALUES) != call.values
        )
        text = "" if call is None or known is not None else call.text()
        row = [
            _REFUSED if prepared.refused is not None else _NONE if known is None else known.number,
            prepared.version,
            self.versions.get(prepared.names, _NONE),
            int(call is not None and bool(call.tensors)),
            int(changed_values),
            *text_digest(text),
        ]
        said = rows.gather(row, _left(deadline))
        if prepared.refused is not None:
            rows.post(exchange, str(prepared.refused), deadline)
            raise prepared.refused
        self._raise_another(said, "refused its arguments", exchange, deadline)
        assert call is not None
        version = _agreed_version(said, rank)
        if known is None or any(theirs[0] != known.number for theirs in said.values()):
            agreed, carried = self._agreed(call, text or call.text(), said, exchange, deadline)
            known = None
        else:
            agreed, carried = known.agreed, known.values
            topic = f"values {number}"
            if changed_values:
                rows.post(topic, json.dumps(call.values), deadline)
            told = rows.read(topic, [other for other, theirs in said.items() if theirs[4]], deadline)
            carried.update({other: json.loads(theirs) for other, theirs in told.items()})
        merged = _merged(carried, rank, agreed.own)
        if agreed.twins:
            self._check_twins(agreed.twins, call, number, deadline)
        moving()
        digests = Digests(rank, len(agreed.moves)) if call.options["digest"] else None
        failure: Exception | None = None
        arrived: dict[str, torch.Tensor] = {}
        made: list[Call | None] = []
        values: dict[str, Any] = {}
        try:
            values = {name: restored(each) for name, each in merged.items()}
            if known is None:
                known = Known(number, agreed, compile_batches(self.parent, agreed, call), carried)
            reused = None if memory is None else memory.fitting(agreed.targets)
            arrived = reused or arriving(call, agreed.targets, rank)
            written = [*map(local_of, call.outs.values()), *(reused or {}).values()]
            sent = call.sent(written)
            if reused is not None:
                reused.update(arrived)
            for batch in known.batches:
                batch.wait_for_turn()
            moves(known.batches)
            for batch in known.batches:
                made.append(batch.run(sent, arrived, deadline, None if digests is None else digests.observe))
            self.kept.add(prepared.key, known)
        except (DeadlineExceededError, PeerLostError, AbortedError):
            raise
        except Exception as error:  # of one rank's tensors: ranks that do not need them have to hear of it
            failure = Caller(OP, rank).typed(error)
            for batch in [] if known is None else known.batches[len(made) + was_told(error) :]:
                batch.refuse(failure, _left(deadline))
        changed = prepared.changed([] if known is None else known.sources)
        state = _REFUSED if failure is not None else changed[0] if changed else _NONE
        ended = rows.gather([state, *([] if digests is None else digests.row())], _left(deadline))
        rows.forget(deadline)
        if failure is not None:
            rows.post(f"failed {number}", str(failure), deadline)
            raise failure
        self._raise_another(ended, "could not take part", f"failed {number}", deadline)
        assert known is not None
        note_outputs(call)
        check_whole(known.parts, known.sources, ended, rank, digests is not None)
        if version != _NONE:
            self.versions[prepared.names] = version
        fill(result, call, agreed.targets, arrived, values)
        result.version = None if version == _NONE else version
        return known, [each for each in made if each is not None]

    def _check_twins(
        self, twins: Mapping[str, Origin], call: StateCall, number: int, deadline: float
    ) -> None:
        """Raises on all ranks where meshes hold different values under one name. Reads each tensor once."""
        rank, digests, failure = self.parent.rank, [0] * len(twins), None
        try:
            for at, (name, origin) in enumerate(twins.items()):
                for layout in origin.twins:
                    if rank in layout.ranks:
                        local = local_of(call.tensors[name])
                        digests[at] = shard_digest(local, layout, origin.shape, rank)
        except Exception as error:  # the others have to hear of it
            failure = Caller(OP, rank).typed(error)
        topic = f"twins {number}"
        said = self.rows.gather([_NONE if failure is None else _REFUSED, *digests], _left(deadline))
        if failure is not None:
            self.rows.post(topic, str(failure), deadline)
            raise failure
        self._raise_another(said, "could not take part", topic, deadline)
        check_twins(twins, {other: row[1:] for other, row in said.items()}, rank)

    def _raise_another(self, said: Mapping[int, list[int]], what: str, topic: str, deadline: float) -> None:
        """Raises where another rank's row says that it raises, with what it posts about it."""
        for other, theirs in said.items():
            if theirs[0] == _REFUSED:
                raise PlanMismatchError(
                    f"{OP}: rank {other} {what}: {self.rows.read(topic, [other], deadline)[other]}",
                    rank=self.parent.rank,
                    peer=other,
                    op=OP,
                    phase="agree",
                )

    def _agreed(
        self, call: StateCall, text: str, said: Mapping[int, list[int]], exchange: str, deadline: float
    ) -> tuple[Agreed, dict[int, dict[str, Any]]]:
        """From what all ranks said; the same on all, or the same error. text: what this rank says. Of ranks
        whose rows have one digest only the first posts its text; one without a digest posts its own."""
        rank = self.parent.rank
        first: dict[tuple[int, ...], int] = {}
        speakers = {
            other: first.setdefault(tuple(theirs[5:]), other) if any(theirs[5:]) else other
            for other, theirs in said.items()
        }
        if speakers[rank] == rank:
            self.rows.post(exchange, text, deadline)
        layouts: dict[Layout, Layout] = {}
        others = sorted({*speakers.values()} - {speakers[rank]})
        texts = self.rows.read(exchange, others, deadline) | {speakers[rank]: text}
        sides = {other: decode(texts[other], layouts) for other in sorted(texts)}
        return agree({other: sides[speaker] for other, speaker in speakers.items()}, call.maps, rank), {
            other: sides[speaker].carried for other, speaker in speakers.items()
        }


def conversation(parent: ParentGroup, lost: Collection[int] = ()) -> Conversation:
    """Returns the conversation of a process group without its lost ranks, made at its first call."""
    without = sorted(parent.ranks.intersection(lost))
    key = f"{OP} without {without}" if without else OP
    found: Conversation | None = parent.extras.get(key)
    if found is None:
        found = parent.extras[key] = Conversation(parent, {}, without)
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


def _merged(values: Mapping[int, Mapping[str, str]], rank: int, own: frozenset[str]) -> dict[str, str]:
    """The entries that are no tensors, as texts, which are the same on all ranks that have one; of a rank's
    own, those of the lowest."""
    found: dict[str, tuple[int, str]] = {}
    for other in sorted(values):
        for name, value in values[other].items():
            first, earlier = found.setdefault(name, (other, value))
            if name not in own and not same_values(earlier, value):
                raise mismatch(
                    f"{name!r} is {shown(earlier)} on rank {first}, but {shown(value)} on rank {other}", rank
                )
    return {name: value for name, (_, value) in found.items()}


_QUEUE = "background reshard_state_dict"


class _Queue:
    """Work of one process group. Its thread ends when there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Work] = deque()
        self._busy = False

    def put(self, work: _Work) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._busy:
                return
            self._busy = True
        thread = threading.Thread(target=self._run, name="meshcast-state", daemon=True)
        try:
            thread.start()
        except (
            RuntimeError
        ):  # no thread is to be had: the other ranks wait for this one, so it comes by itself
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                work = self._waiting.popleft()
            work.run()


def own_stream() -> torch.cuda.Stream | None:
    """The stream that the caller works on; None where it uses no GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


@contextmanager
def behind(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queues the GPU work of its block, in this thread, after what that stream holds."""
    if stream is None:
        yield
        return
    torch.cuda.set_device(stream.device)
    with torch.cuda.stream(stream):
        yield


class _Work(Unordered):
    """One call, as its handle sees it. On a GPU it is behind what the caller's stream held, as a call that
    blocks would be."""

    op = OP

    def __init__(self, step: Callable[[], list[Call]]) -> None:
        self._step = step
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._made: list[Call] = []
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._stream = own_stream()

    def run(self) -> None:
        try:
            with behind(self._stream):
                self._made = self._step()
        except BaseException as error:
            self._error = error
        finally:
            del self._step  # and the tensors that it holds
            self._ended.set()
            # Not here: a callback may wait for a later call, which this thread is to do.
            call_back(partial(self._future.set_result, None))

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)  # else each raise would add to the last one's

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def figures(self) -> dict[str, Any]:
        each = [figures for call in self._made if (figures := call.figures()) is not None]
        return {
            name: sum(figures[name] for figures in each)
            for name in ("bytes_sent", "bytes_received", "seconds")
        }


def beside(parent: ParentGroup, lost: Collection[int] = ()) -> Conversation:
    """The conversation of the calls that run beside others. Versions are those of the process group."""
    talk = conversation(parent.twin(OP), lost)
    talk.versions = conversation(parent, lost).versions
    return talk


def started(
    parent: ParentGroup,
    prepared: Prepared,
    limit: float,
    run: Callable[[Conversation, float, ReshardedState], tuple[Known, list[Call]]] | None = None,
    lost: Collection[int] = (),
    copy: bool = False,
) -> Handle[ReshardedState]:
    """Starts a call. limit: seconds. run: what to do in place of Conversation.run alone. lost: ranks that
    make no call any more. copy: of what is held, at once."""
    if copy:
        prepared.keep_copies()
    prepared.keep_digests()
    talk = beside(parent, lost)
    queue: _Queue = talk.parent.extras.setdefault(_QUEUE, _Queue())
    result = ReshardedState()
    bounds: list[float] = []
    deadline = time.monotonic() + limit

    def step() -> list[Call]:
        if run is None:
            kind, made = talk.run(prepared, deadline, result)
        else:
            kind, made = run(talk, deadline, result)
        bounds.extend(batch.bound() for batch in kind.batches)
        return made

    work = _Work(step)
    queue.put(work)
    return Handle(work, result, lambda: sum(bounds))
