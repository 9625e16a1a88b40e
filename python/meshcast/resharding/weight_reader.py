"""WeightReader: versions of a WeightSync for processes outside its group, as one that has just restarted.

A reader asks in a store. Ranks that have a whole version offer it, and the reader chooses the newest; it
meets those that have it, and one call of reshard_state_dict among them brings what it wants. So the trainers
take no part, and no byte moves before the reader knows names, shapes and dtypes. Ranks that offer continue to
receive versions: one that is written while it is read is not returned, and the reader asks again.

Keys in the store, by the number n of a question: `ask/n` is the question, "" once it is answered; `offers/n`
counts the offers, which are `offer/n/1` and so on; `meet/n` names those that the reader has chosen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from ..base import checks, forks
from ..base.boxes import Box, box_text, common, extents, piece_view, without
from ..base.observe import log
from ..base.wire import pack, text_digest, unpack
from ..errors import (
    AbortedError,
    Caller,
    DeadlineExceededError,
    LayoutError,
    MeshcastError,
    PeerLostError,
)
from ..groups.parent import StoreConnection, seconds
from ..groups.private import Contact
from ..groups.store import first_line, no_thread, within
from ..layout import Layout
from ..transfers.digest import added, box_digest
from .compiled import as_dtensor, tensor_spec
from .meeting import Meeting
from .meshes import positive_placements
from .state_arguments import Reading
from .state_background import behind
from .state_entries import ReshardedState, Target, local_of, names_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .state_dict import Where
    from .weight_buffers import Buffers

__all__ = ["Offering", "TensorManifest", "WeightManifest", "WeightReader"]

_T = TypeVar("_T")
_OP = "WeightReader"
_PREFIX = "meshcast weights"
_DAY = timedelta(days=1)
_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks into the store
_GATHER = 0.2  # seconds that a first offer waits for those of ranks that may have died
_AGAIN = 0.5  # seconds until a question is put again, to ranks that have had no version
_KEPT, _SWEEP = 256, 64  # answered questions whose keys stay in the store; questions between two sweeps
_CHOOSE = 5.0  # seconds that a reader has to choose
_SOON = 0.05  # seconds after which a rank that waits for a reader looks whether that is there
_GRACE = 1.0  # seconds that the store gets beyond the limit of a call
_TORN = "torn"  # sent instead of digests


@dataclass(frozen=True)
class TensorManifest:
    """A tensor of a version.

    Attributes:
        shape, dtype: of the whole tensor, as it is served.
        digest: of all of its values, as ``digest=True`` compares it, however it is sharded; None where it was
            not asked for, or where the ranks that have the version do not have all of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int | None = None


@dataclass(frozen=True)
class WeightManifest:
    """A version, before a byte of it moves.

    Attributes:
        version: its number.
        tensors: by name.
    """

    version: int
    tensors: Mapping[str, TensorManifest]


class _Served(NamedTuple):
    """A tensor that is served. layout: with all ranks that receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


_Holding = dict[str, _Served]
_Whole = tuple[int, ReshardedState, dict[str, Target]]  # as Buffers.whole()


class _Ask(NamedTuple):
    """A question. least: the oldest version that will do. timeout: seconds for all of it. contact: of the
    reader."""

    least: int
    timeout: float
    contact: str


class _Offered(NamedTuple):
    """A rank that has the version, -1 where it has none. job: of the WeightSync; later ones are larger.
    holding: the key of what is served. ranks: those of its group, one more than the largest. contact: of the
    rank."""

    version: int
    rank: int = -1
    job: str = ""
    holding: str = ""
    ranks: int = 0
    contact: str = ""


class _Meet(NamedTuple):
    """The offers that a reader takes, by their numbers, and the ranks that made them, in the same order.
    number: of the reader, in the meeting. boxes: of which each of the offers is to send digests, by name."""

    version: int
    offers: tuple[int, ...]
    ranks: tuple[int, ...]
    number: int
    digest: bool
    timeout: float
    boxes: dict[int, dict[str, tuple[Box, ...]]]


class _Questions:
    """The keys that readers and those that answer them have in common. Each uses a connection of its own."""

    def __init__(self, store: dist.Store) -> None:
        self._connection = StoreConnection(store, _PREFIX)
        self._opened: Any = None
        self.for_meetings = StoreConnection(store, _PREFIX)  # nothing waits in this one

    @property
    def store(self) -> Any:
        if self._opened is None:
            self._opened = self._connection()
        return self._opened

    def ask(self, text: str) -> int:
        """Returns the number of the question."""
        number = int(self.store.add("asked", 1))
        self.store.set(f"ask/{number}", text)
        return number

    def close(self, number: int) -> None:
        """The question is answered. Its keys are erased later: ranks may be about to read them."""
        store, old = self.store, number - _KEPT
        store.set(f"ask/{number}", "")
        if old < 1:
            return
        keys = [f"{name}/{old}" for name in ("ask", "offers", "meet")]
        for at in range(int(store.add(f"offers/{old}", 0))):
            keys += [f"offer/{old}/{at + 1}", f"sums/{old}/{at + 1}"]
        if number % _SWEEP == 0 and hasattr(store, "list_keys"):  # those of meetings, by number
            firsts = {key: key.partition("/")[0] for key in store.list_keys()}
            keys += [key for key, first in firsts.items() if first.isdigit() and int(first) <= old]
        for key in keys:
            store.delete_key(key)

    def heard(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def _waited(look: Callable[[], _T | None], deadline: float) -> _T | None:
    """Returns what look() finds, or None at the deadline."""
    pause = _PAUSE
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return found


class Offering:
    """The part of a rank that answers readers, in a thread of its own: it waits in the store, and needs no
    CPU time between two questions. A failure is logged, and concerns no other call."""

    def __init__(
        self,
        store: dist.Store,
        buffers: Buffers,
        rank: int,
        ranks: Iterable[int],
        job: str,
    ) -> None:
        """buffers: whose newest whole version is offered. ranks: of the group. job: the same on all ranks of
        one WeightSync, and larger than that of an earlier one."""
        self._questions = _Questions(store)
        self._job = job
        self._fork_count = forks.count
        self._store = store
        self._buffers, self._rank, self._ranks = buffers, rank, max(ranks) + 1
        self._holding: tuple[dict[str, Target], str] | None = None  # what was served last, and its key
        self._meeting: Meeting | None = None
        self._over = False
        self._thread: threading.Thread | None = None

    def start(self, stream: torch.cuda.Stream | None, limit: float) -> None:
        """stream: that receives versions on a GPU. limit: of the store, seconds. Questions that were put
        before are not answered: they are put again."""
        caller = Caller("WeightSync", self._rank, "start")

        with caller:
            self._contact = Contact(limit)

        def enter() -> int:
            self._questions.store.add("offering", 1)
            return int(self._questions.store.add("asked", 0)) + 1

        first = within(limit, enter, "connecting with the store of readers=", caller)
        thread = threading.Thread(
            target=self._run, args=(first, stream), name="meshcast-readers", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise no_thread("answering readers", caller) from error
        self._thread = thread

    def stop(self, wait: float = 0.0) -> None:
        """Answers no longer. Any thread. wait: seconds, for the thread to end."""
        thread, self._thread = self._thread, None
        if self._over or thread is None or self._fork_count != forks.count:
            return
        self._over = True
        meeting = self._meeting
        if meeting is not None:
            meeting.close()

        def leave() -> None:
            with suppress(Exception):  # the store may have ended before
                questions = _Questions(self._store)
                questions.store.add("offering", -1)
                questions.ask("")  # which wakes the thread

        with suppress(RuntimeError):
            threading.Thread(target=leave, name="meshcast-store", daemon=True).start()
        if wait and thread is not threading.current_thread():
            thread.join(wait)

    def _run(self, number: int, stream: torch.cuda.Stream | None) -> None:
        store = self._questions.store
        with behind(stream):
            while not self._over:
                try:
                    number = max(number, int(store.add("asked", 0)) - _KEPT // 2)
                    with suppress(dist.DistStoreError):  # its limit
                        store.wait([f"ask/{number}"], _DAY)
                        self._answer(number)
                        number += 1
                except (dist.DistError, OSError) as error:
                    if isinstance(error, MeshcastError):  # of a transfer
                        self._failed(number, error)
                        number += 1
                        continue
                    if not self._over:
                        log.warning(
                            "rank %d: readers are not answered any longer: their store has failed (%s)",
                            self._rank,
                            first_line(error),
                        )
                    return
                except Exception as error:
                    self._failed(number, error)
                    number += 1

    def _failed(self, number: int, error: Exception) -> None:
        if not self._over:
            log.info("rank %d: question %d of a reader: %s", self._rank, number, error)

    def _answer(self, number: int) -> None:
        questions, text = self._questions, self._questions.heard(f"ask/{number}")
        if not text or self._over:
            return
        ask = unpack(_Ask, text)
        deadline = time.monotonic() + ask.timeout
        found = self._buffers.whole()
        offer = _Offered(-1)
        if found is not None and found[0] >= ask.least:
            published = self._published(found[2])
            offer = _Offered(found[0], self._rank, self._job, published, self._ranks, self._contact.text)
        mine = int(questions.store.add(f"offers/{number}", 1))
        questions.store.set(f"offer/{number}/{mine}", pack(offer))
        if found is None or offer.version < 0:
            return

        watch: Callable[[], str] | None = None
        begin = time.monotonic()

        def look() -> str | None:
            nonlocal watch
            if self._over or not questions.heard(f"ask/{number}"):
                return ""
            if watch is None and time.monotonic() > begin + _SOON:
                watch = self._contact.watch(ask.contact)
            if watch is not None and watch():  # the reader has exited
                return ""
            return questions.heard(f"meet/{number}")

        if not (text := _waited(look, min(deadline, begin + _CHOOSE))):
            return
        meet = unpack(_Meet, text)
        if mine in meet.boxes:
            sums = {name: self._sum(name, boxes, found) for name, boxes in meet.boxes[mine].items()}
            text = pack(sums, dict[str, int]) if self._buffers.has(found[1]) else _TORN
            questions.store.set(f"sums/{number}/{mine}", text)
        elif mine in meet.offers:
            self._send(number, meet, found, deadline, ask.contact)

    def _published(self, targets: dict[str, Target]) -> str:
        """The key in the store of what is served, which all ranks have written that serve the same."""
        known = self._holding
        if known is None or known[0] is not targets:
            holding = {name: _Served(each.shape, each.dtype, each.layout) for name, each in targets.items()}
            text = pack(holding, _Holding)
            low, high = text_digest(text)
            key = f"holding/h{low & (1 << 64) - 1:016x}{high & (1 << 64) - 1:016x}"
            self._questions.store.set(key, text)
            known = self._holding = targets, key
        return known[1]

    def _sum(self, name: str, boxes: Sequence[Box], whole: _Whole) -> int:
        """The digest of the parts of these boxes that this rank has."""
        target = whole[2][name]
        local, sums = local_of(whole[1][name]), []
        for piece in target.layout.pieces(target.shape)[self._rank][1]:
            view = piece_view(local, piece)
            for box in boxes:
                both = common(piece[0], box)
                if both is not None:
                    part = view
                    for dim, (low, high) in enumerate(both):
                        part = part.narrow(dim, low - piece[0][dim][0], high - low)
                    sums.append(box_digest(part, both, target.shape, target.dtype))
        return added(sums)

    def _send(self, number: int, meet: _Meet, whole: _Whole, deadline: float, contact: str) -> None:
        _, state, targets = whole
        inside = {name: each for name, each in targets.items() if self._rank in each.layout.ranks}
        held = {name: local_of(state[name]) for name in inside if name in state}
        ranks, contacts = (*meet.ranks, meet.number), {meet.number: contact}
        name = str(number)
        connection = self._questions.for_meetings
        meeting = self._meeting = Meeting(connection, name, ranks, self._rank, meet.timeout, contacts)
        try:
            meeting.move(
                held,
                None,
                deadline=deadline,
                layouts={name: (inside[name].layout, inside[name].shape) for name in held},
                lost=_others(targets.values(), meet),
                still=lambda: self._buffers.has(state),
                digest=meet.digest,
                strict=False,
            )
        finally:
            self._meeting = None
            meeting.close()


def _others(tensors: Iterable[_Served | Target], meet: _Meet) -> list[int]:
    """Ranks that take part in what is served, and not in this meeting."""
    return sorted({rank for each in tensors for rank in each.layout.ranks} - set(meet.ranks))


class _Newest(NamedTuple):
    """The newest version that is offered: number of the question, when it was put, and those that have this
    version, with their ranks and contacts."""

    number: int
    asked: float
    version: int
    holding: _Holding
    chosen: dict[int, int]  # offer by rank
    contacts: dict[int, str]  # by rank
    ranks: int


class _Place(NamedTuple):
    """A destination by itself. mesh: of a result that is a DTensor."""

    where: Layout
    device_type: str
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]

    def layout(self, ndim: int) -> Layout:
        """The layout of a tensor of so many dimensions."""
        placements = positive_placements(self.placements, ndim)
        return self.where if self.mesh is None else Layout(self.mesh, placements)


def _places(destinations: Mapping[str, Any], rank: int) -> dict[str, _Place]:
    """Returns the destinations of one rank that is in all of them. Raises LayoutError for others, and for
    tensors to receive into."""
    if not isinstance(destinations, Mapping):
        raise LayoutError(f"destinations {checks.shown(destinations)}: expected a mapping by name")
    reading, found = Reading(rank, {}), {}
    for name, where in destinations.items():
        wanted, mesh, placements = reading.wanted(name, where, None, True)
        if wanted.layout is None:
            raise LayoutError(f"the destination of {name!r} is a tensor; give (mesh, placements) or a Layout")
        if rank not in wanted.layout.ranks:
            raise LayoutError(f"rank {rank} is not in the destination of {name!r}, {wanted.layout}")
        found[name] = _Place(wanted.layout, wanted.device_type, mesh, placements or ())
    return found


class WeightReader:
    """Versions of a model's weights for a process outside the group of a `WeightSync`, from ranks that have
    received them: an engine that has restarted, one that was added, an evaluation.

    The ranks of the WeightSync give it the same store as ``readers=``. The reader gets the newest version
    that is whole on some of them, from all that have it, while training and pushes continue; the trainers
    take no part. It may lie in any layout. A version that is replaced while it is read is not returned: the
    reader then asks for the newest again.

    Args:
        store: connected with the server of the store that the WeightSync got, with the same prefixes.
        destinations: {name: (mesh, placements)}, or a Layout, or (Layout, "cuda"), as for
            reshard_state_dict: what this process wants, of the names that the WeightSync receives.
        rank: the number of this process in these destinations; by default its rank in the default process
            group.
        timeout: seconds that a call may take.
        digest: compare a digest of every tensor at both ends.

    Raises:
        LayoutError: a wrong argument.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``, the last of which reads from outside::

        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # that of rank 0
        ports, trains, serves = [server.port], dist.get_rank() == 0, dist.get_rank() in (1, 2)
        dist.broadcast_object_list(ports)
        store = dist.TCPStore("localhost", ports[0], is_master=False)
        weights = {"w": distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0]), [Replicate()])}
        where = {"w": (DeviceMesh("cpu", [1, 2]), [Shard(0)])}
        with meshcast.WeightSync(weights if trains else None, where, readers=store) as sync:
            if trains:
                sync.push(1)
            elif serves:
                sync.pull(1)
            else:
                with meshcast.WeightReader(store, {"w": meshcast.Layout([3], [Replicate()])}) as reader:
                    assert reader.pull() == 1
                    assert bool((reader.state["w"] == 1).all())
            dist.barrier()
    """

    def __init__(
        self,
        store: dist.Store,
        destinations: Mapping[str, Where],
        *,
        rank: int | None = None,
        timeout: float | timedelta = 60.0,
        digest: bool = False,
    ) -> None:
        self._fork_count = forks.count
        self._turn = threading.Lock()
        self._closed = False
        self._state: ReshardedState | None = None
        with Caller(_OP):
            if not isinstance(store, dist.Store):
                raise LayoutError(f"store {checks.shown(store)}: expected a torch.distributed.Store")
            if rank is None:
                if not dist.is_initialized():
                    raise LayoutError("rank=None without a process group; give the number of this process")
                rank = dist.get_rank()
            self._rank = checks.integer("rank", rank, 0, (1 << 31) - 2)
            self._limit = seconds(timeout, 60.0)
            self._digest = bool(digest)
            self._where = _places(destinations, self._rank)
        self._questions = _Questions(store)
        with Caller(_OP):
            self._contact = Contact(self._limit)

    def manifest(self, version: int | None = None, *, digest: bool = False) -> WeightManifest:
        """The newest version that can be read, and its tensors; nothing is moved. The next `pull` may find a
        newer one.

        version: the oldest that will do. digest: of every tensor, which the ranks that have the version
        compute: each value is read once, on one of them.

        Raises:
            DeadlineExceededError: no rank has offered such a version within the limit.
        """
        wanted = self._checked("manifest", version)
        deadline = time.monotonic() + self._limit
        with self._turn:
            sums: dict[str, int] | None = None
            while sums is None:
                found = self._find(wanted, deadline)
                try:
                    sums = self._summed(found, deadline) if digest else {}
                finally:
                    self._close(found)
        return WeightManifest(
            found.version,
            {
                name: TensorManifest(each.shape, each.dtype, sums.get(name))
                for name, each in found.holding.items()
            },
        )

    def pull(self, version: int | None = None) -> int:
        """Makes the newest version current that can be read, and returns its number. `state` has its tensors;
        those of the version before stay as they are.

        version: the oldest that will do; it waits for that. Without it, the current version stays current
        where no newer one is offered.

        Raises:
            DeadlineExceededError: no such version was offered within the limit, or none arrived.
            LayoutError: a name that is not served, or a destination that does not fit its tensor. Nothing
                was moved.
            PeerLostError, MeshcastError: the last attempt failed in this way, and the limit has passed.
        """
        wanted = self._checked("pull", version)
        begin = time.monotonic()
        deadline = begin + self._limit
        failed: MeshcastError | None = None
        with self._turn:
            while True:
                current = -1 if self._state is None else self.version or 0
                if version is not None and current >= wanted:
                    return current
                newer = max(wanted, current + 1)
                if version is None and current >= 0:  # what is current will do
                    found, _ = self._within(partial(self._asked, newer, deadline), deadline)
                    if found is None:
                        return current
                else:
                    try:
                        found = self._find(newer, deadline)
                    except DeadlineExceededError as late:
                        raise failed or late from None
                try:
                    # A rank that freezes must not take all of the time.
                    self._state = self._received(found, (time.monotonic() + deadline) / 2)
                    return found.version
                except LayoutError:
                    raise
                except MeshcastError as error:
                    failed = error
                    log.info("%s: version %d was not read: %s", _OP, found.version, error)
                    if time.monotonic() >= deadline:
                        raise
                finally:
                    self._close(found)
                time.sleep(max(min(_AGAIN, deadline - time.monotonic()), 0.0))

    @property
    def state(self) -> ReshardedState:
        """The current version: {name: tensor}, with its `version`. Raises MeshcastError before the first
        pull."""
        if self._state is None:
            raise Caller(_OP).error(MeshcastError, "no version has been pulled yet")
        return self._state

    @property
    def version(self) -> int | None:
        """The number of the current version; None before the first pull."""
        return None if self._state is None else self._state.version

    def close(self) -> None:
        """Ends it. The current version stays usable."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{_OP} of {len(self._where)} names, version {self.version}>"

    def _checked(self, what: str, version: int | None) -> int:
        forks.check(self._fork_count, f"{_OP}.{what}")
        caller = Caller(f"{_OP}.{what}")
        if self._closed:
            raise caller.error(AbortedError, "it was closed")
        with caller:
            return 0 if version is None else checks.integer("version", version, 0, (1 << 62) - 1)

    def _within(self, call: Callable[[], _T], deadline: float) -> _T:
        limit = max(deadline - time.monotonic(), 0.0) + _GRACE
        return within(limit, call, "asking for weights", Caller(_OP, phase="agree"))

    def _late(self, text: str, elapsed: float) -> DeadlineExceededError:
        caller = Caller(_OP, phase="wait")
        return caller.error(DeadlineExceededError, text, elapsed=elapsed, limit=self._limit)

    def _find(self, least: int, deadline: float) -> _Newest:
        """Asks until a version is offered."""
        begin, answers = time.monotonic(), 0
        while True:
            found, now_answered = self._within(lambda: self._asked(least, deadline), deadline)
            answers = max(answers, now_answered)
            if found is not None:
                return found
            now = time.monotonic()
            if now >= deadline:
                what = "any version" if not least else f"version {least} or a newer one"
                why = f"{answers} ranks have answered, and have none" if answers else "no rank has answered"
                raise self._late(f"waited {now - begin:.1f} s for {what}: {why}", now - begin)
            if now_answered:  # else it has waited for them
                time.sleep(min(_AGAIN, deadline - now))

    def _asked(self, least: int, deadline: float) -> tuple[_Newest | None, int]:
        """One question. Returns the newest version that is offered, and how many ranks have answered."""
        questions, store = self._questions, self._questions.store
        now = time.monotonic()
        number = questions.ask(pack(_Ask(least, max(deadline - now, _PAUSE), self._contact.text)))
        offers: list[_Offered] = []
        first: float | None = None
        until = min(deadline, now + _AGAIN)

        def look() -> bool | None:
            nonlocal first
            count = int(store.add(f"offers/{number}", 0))
            while len(offers) < count:
                text = questions.heard(f"offer/{number}/{len(offers) + 1}")
                if text is None:  # it is being written
                    return None
                offers.append(unpack(_Offered, text))
            if first is None and any(each.version >= 0 for each in offers):
                first = time.monotonic()
            whole = len(offers) >= int(store.add("offering", 0)) > 0
            return True if whole or (first is not None and time.monotonic() > first + _GATHER) else None

        _waited(look, until)
        version = max((each.version for each in offers), default=-1)
        if version < 0:
            questions.close(number)
            return None, len(offers)
        of_version = [(at + 1, each) for at, each in enumerate(offers) if each.version == version]
        kinds = [(each.job, each.holding) for _, each in of_version]
        kind = max(set(kinds), key=lambda each: (each[0], kinds.count(each)))
        holding = kind[1]
        chosen = {each.rank: at for at, each in of_version if (each.job, each.holding) == kind}
        ranks = max(each.ranks for _, each in of_version)
        read = unpack(_Holding, store.get(holding).decode())
        contacts = {rank: offers[at - 1].contact for rank, at in chosen.items()}
        return _Newest(number, now, version, read, chosen, contacts, ranks), len(offers)

    def _close(self, found: _Newest) -> None:
        with suppress(Exception):  # the store's keys are all that would be left
            self._within(lambda: self._questions.close(found.number), time.monotonic())

    def _meet(self, found: _Newest, deadline: float, boxes: Any = None) -> _Meet:
        if time.monotonic() > found.asked + _CHOOSE / 2:
            text = f"it took too long to choose who sends version {found.version}, and asks again"
            raise Caller(_OP, phase="agree").error(MeshcastError, text)
        ranks = sorted(found.chosen)
        meet = _Meet(
            found.version,
            tuple(found.chosen[rank] for rank in ranks),
            tuple(ranks),
            found.ranks,
            self._digest,
            max(deadline - time.monotonic(), _PAUSE),
            boxes or {},
        )
        self._within(lambda: self._questions.store.set(f"meet/{found.number}", pack(meet)), deadline)
        return meet

    def _received(self, found: _Newest, deadline: float) -> ReshardedState:
        """Returns the destinations of this process, filled from a version that was found."""
        missing = [name for name in self._where if name not in found.holding]
        if missing:
            raise Caller(_OP, phase="agree").error(
                LayoutError,
                f"{names_text(missing)}: version {found.version} has no such tensor; it has "
                f"{names_text(list(found.holding))}",
            )
        wanted: dict[str, Any] = {}
        shapes: dict[str, tuple[Layout, tuple[int, ...]]] = {}
        with Caller(_OP, phase="agree"):
            for name, place in self._where.items():
                tensor = found.holding[name]
                layout = place.layout(len(tensor.shape))
                local, pieces = layout.pieces(tensor.shape)[self._rank]
                shapes[name] = layout, local
                boxes = [piece[0] for piece in pieces if all(low < high for low, high in piece[0])]
                self._check_served(name, tensor, boxes, found)
                if boxes:
                    wanted[name] = Layout._of_held((found.ranks,), ((local, pieces),), len(tensor.shape))
        arrived = self._moved(found, wanted, deadline) if wanted else ReshardedState()
        result = ReshardedState()
        for name, place in self._where.items():
            tensor, (layout, local) = found.holding[name], shapes[name]
            x = arrived.pop(name, None)
            if x is None:
                x = torch.empty(local, dtype=tensor.dtype, device=place.device_type)
            result[name] = (
                x
                if place.mesh is None
                else as_dtensor(x, tensor_spec(place.mesh, layout, tensor.shape, tensor.dtype))
            )
        result.version = found.version
        return result

    def _moved(self, found: _Newest, wanted: dict[str, Layout], deadline: float) -> ReshardedState:
        """Returns the values in these layouts, which name this process by its number in the meeting."""
        meet = self._meet(found, deadline)
        name, ranks = str(found.number), (*meet.ranks, meet.number)
        meeting = Meeting(
            self._questions.for_meetings, name, ranks, meet.number, meet.timeout, found.contacts
        )
        try:
            return meeting.move(
                {},
                {name: (layout, self._where[name].device_type) for name, layout in wanted.items()},
                deadline=deadline,
                lost=_others(found.holding.values(), meet),
                digest=self._digest,
                strict=False,
            )
        finally:
            meeting.close()

    def _check_served(self, name: str, tensor: _Served, boxes: Sequence[Box], found: _Newest) -> None:
        """Raises PeerLostError where the ranks that have the version do not have all of these boxes."""
        pieces = tensor.layout.pieces(tensor.shape)
        served = [piece[0] for rank in found.chosen if rank in pieces for piece in pieces[rank][1]]
        for box in boxes:
            rest = without(box, served)
            if rest:
                others = [rank for rank in tensor.layout.ranks if rank not in found.chosen]
                raise PeerLostError(
                    f"no rank that has answered has {box_text(rest[0])} of {name!r} in version "
                    f"{found.version}; ranks {others} have not answered",
                    phase="agree",
                    peer=others[0] if others else None,
                )

    def _summed(self, found: _Newest, deadline: float) -> dict[str, int] | None:
        """The digests of all tensors that the ranks have all of, each value read on one rank. None where a
        rank has another version by then."""
        boxes: dict[int, dict[str, tuple[Box, ...]]] = {offer: {} for offer in found.chosen.values()}
        whole = []
        for name, tensor in found.holding.items():
            pieces = tensor.layout.pieces(tensor.shape)
            rest: list[Box] = [tuple((0, size) for size in tensor.shape)]
            rest = [box for box in rest if all(extents(box))]
            for rank, offer in found.chosen.items():
                for piece in pieces[rank][1] if rank in pieces else ():
                    mine = [both for box in rest if (both := common(box, piece[0])) is not None]
                    if mine:
                        boxes[offer][name] = (*boxes[offer].get(name, ()), *mine)
                        rest = [left for box in rest for left in without(box, mine)]
            if not rest:
                whole.append(name)
        self._meet(found, deadline, boxes)
        questions, sums = self._questions, dict.fromkeys(whole, 0)

        def gather() -> bool | None:
            torn = False
            for offer in boxes:
                key = f"sums/{found.number}/{offer}"
                text = _waited(partial(questions.heard, key), deadline)
                if text is None:
                    return None
                torn = torn or text == _TORN
                for name, value in ({} if text == _TORN else unpack(dict[str, int], text)).items():
                    if name in sums:
                        sums[name] = added((sums[name], value))
            return not torn

        whole_version = self._within(gather, deadline)
        if whole_version is None:
            text = f"waited {self._limit:.1f} s for digests of version {found.version}"
            raise self._late(text, self._limit)
        return sums if whole_version else None
