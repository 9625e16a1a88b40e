"""Offers of whole versions of a WeightSync to readers, which are processes outside its group.

A reader asks in a store. Ranks that have received a version whole offer it, and the reader chooses the
newest; it meets those that have it, and one call of reshard_state_dict among them brings what it wants. No
byte moves before the reader knows names, shapes and dtypes. Ranks that offer continue to receive versions:
one that is written while it is read is not returned, and the reader asks again.

Where no rank offers what it needs, the reader asks those that push, under another prefix, and that question
stays open. They answer it in their next push, once its version is whole everywhere; the weights cannot change
before the push returns. All of them have to answer the same questions in the same order, so that they take
the list of the first one of them. Those that keep a copy answer at any time, as ranks that receive do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..base import forks
from ..base.boxes import Box, common, piece_view
from ..base.observe import log
from ..base.wire import pack, text_digest, unpack
from ..errors import Caller, DeadlineExceededError, MeshcastError
from ..groups.private import Contact
from ..groups.store import first_line, no_thread, within
from ..transfers.digest import added, box_digest
from .meeting import (
    CHOOSE,
    KEPT,
    TORN,
    Ask,
    Holding,
    Meeting,
    Offered,
    Questions,
    Served,
    Taken,
    others,
    waited,
)
from .state_background import behind, own_stream
from .state_entries import ReshardedState, Target, local_of
from .weight_buffers import Buffers, WeightStats

__all__ = ["Keeping", "Offering", "Pushing"]

_DAY = timedelta(days=1)
_SOON = 0.05  # seconds after which a rank that waits for a reader looks whether that is there
_PEERS = 1.0  # seconds that ranks that have received a version have for a reader, before those that push
_T = TypeVar("_T")
_Numbers = tuple[int, ...]
_Whole = tuple[int, Mapping[str, torch.Tensor], dict[str, Target]]  # as Buffers.whole()


class _Answers:
    """The part of a rank that sends readers a version. A failure is logged, and concerns no other call."""

    def __init__(self, questions: Questions, rank: int, ranks: Iterable[int], job: str) -> None:
        """ranks: of the group. job: the same on all ranks of one WeightSync, and larger than that of an
        earlier one."""
        self._questions, self._job = questions, job
        self._rank, self._ranks = rank, max(ranks) + 1
        self._fork_count = forks.count
        self._holding: tuple[dict[str, Target], str] | None = None  # what was served last, and its key
        self._meeting: Meeting | None = None
        self._offers = False  # has offered, and neither sent nor been left
        self._over = False

    def start(self, stream: torch.cuda.Stream | None, limit: float) -> None:  # noqa: ARG002
        """stream: that writes what is served. limit: of the store, seconds."""
        with Caller("WeightSync", self._rank, "start"):
            self._contact = Contact(limit)

    def _end(self) -> bool:
        """Answers no longer. Returns whether it has until now. Any thread."""
        if self._over or self._fork_count != forks.count:
            return False
        self._over = True
        meeting = self._meeting
        if meeting is not None:
            meeting.close()
        return True

    def _failed(self, number: int, error: Exception) -> None:
        if not self._over:
            log.info("rank %d: question %d of a reader: %s", self._rank, number, error)

    def _answer(
        self, number: int, found: _Whole | None, still: Callable[[], bool], latest: float | None, of: int = 0
    ) -> None:
        """One question. found: what this rank has. still(): whether it is as it was. latest: by
        time.monotonic(), instead of what is left to the reader. of: how many ranks have it."""
        questions, text = self._questions, self._questions.heard(f"ask/{number}")
        if not text or self._over:
            return
        ask = unpack(Ask, text)
        latest = time.monotonic() + ask.timeout if latest is None else latest
        offer = Offered(-1)
        if found is not None and found[0] >= ask.least:
            published = self._published(found[2])
            contact = self._contact.text
            offer = Offered(found[0], self._rank, self._job, published, self._ranks, contact, of)
        mine = int(questions.store.add(f"offers/{number}", 1))
        questions.store.set(f"offer/{number}/{mine}", pack(offer))
        if found is None or offer.version < 0:
            return
        self._offers = True
        try:
            self._sent(number, mine, ask, found, still, latest)
        finally:
            self._offers = False

    def _sent(
        self, number: int, mine: int, ask: Ask, found: _Whole, still: Callable[[], bool], latest: float
    ) -> None:
        """Sends what was offered under the number `mine`, if the reader chooses that."""
        questions = self._questions
        watch: Callable[[], str] | None = None
        begin = time.monotonic()

        def look() -> str | None:
            nonlocal watch
            if self._over or not questions.heard(f"ask/{number}"):
                return ""
            if watch is None and time.monotonic() > begin + _SOON:
                watch = self._contact.watch(ask.contact)
            if watch is not None and watch():  # the reader has exited
                questions.store.set(f"ask/{number}", "")
                return ""
            return questions.heard(f"meet/{number}")

        text = waited(look, min(latest, begin + CHOOSE))
        if text is None:  # a reader that was frozen does not look for this rank any longer
            questions.store.set(f"ask/{number}", "")
        if not text:
            return
        meet = unpack(Taken, text)
        if mine in meet.boxes:
            sums = {name: self._sum(name, boxes, found) for name, boxes in meet.boxes[mine].items()}
            text = pack(sums, dict[str, int]) if still() else TORN
            questions.store.set(f"sums/{number}/{mine}", text)
        elif mine in meet.offers:
            self._send(number, meet, found, still, min(latest, time.monotonic() + meet.timeout), ask.contact)

    def _published(self, targets: dict[str, Target]) -> str:
        """The key in the store of what is served, which all ranks have written that serve the same."""
        known = self._holding
        if known is None or known[0] is not targets:
            holding = {name: Served(each.shape, each.dtype, each.layout) for name, each in targets.items()}
            text = pack(holding, Holding)
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

    def _send(
        self,
        number: int,
        meet: Taken,
        whole: _Whole,
        still: Callable[[], bool],
        deadline: float,
        contact: str,
    ) -> None:
        _, state, targets = whole
        inside = {name: each for name, each in targets.items() if self._rank in each.layout.ranks}
        held = {name: local_of(state[name]) for name in inside if name in state}
        contacts = {**dict(zip(meet.ranks, meet.contacts, strict=True)), meet.number: contact}
        contacts.pop(self._rank, None)
        connection, ranks = self._questions.for_meetings, (*meet.ranks, meet.number)
        meeting = Meeting(connection, str(number), ranks, self._rank, meet.timeout, contacts)
        self._meeting = meeting
        try:
            meeting.move(
                held,
                None,
                deadline=deadline,
                layouts={name: (inside[name].layout, inside[name].shape) for name in held},
                lost=others(targets.values(), meet),
                still=still,
                digest=meet.digest,
                strict=False,
            )
        finally:
            self._meeting = None
            meeting.close()


class Offering(_Answers):
    """A thread that answers readers: it waits in the store, and needs no CPU time between two questions."""

    def __init__(
        self,
        store: dist.Store,
        buffers: Buffers,
        rank: int,
        ranks: Iterable[int],
        job: str,
        *,
        pushing: bool = False,
    ) -> None:
        """buffers: whose newest whole version is offered. pushing: to readers that ask ranks that push."""
        super().__init__(Questions(store, pushing=pushing), rank, ranks, job)
        self._store, self._pushing, self._buffers = store, pushing, buffers
        self._thread: threading.Thread | None = None

    def start(self, stream: torch.cuda.Stream | None, limit: float) -> None:
        """Answers questions that were put before to ranks that push; others are put again."""
        super().start(stream, limit)
        caller = Caller("WeightSync", self._rank, "start")

        def enter() -> int:
            self._questions.store.add("offering", 1)
            asked = self._questions.asked()
            return max(asked - KEPT // 2, 0) + 1 if self._pushing else asked + 1

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
        if thread is None or not self._end():
            return

        def leave() -> None:
            with suppress(Exception):  # the store may have ended before
                questions = Questions(self._store, pushing=self._pushing)
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
                    number = max(number, self._questions.asked() - KEPT // 2)
                    with suppress(dist.DistStoreError):  # its limit
                        store.wait([f"ask/{number}"], _DAY)
                        self._answer_now(number)
                        number += 1
                except (dist.DistError, OSError) as error:
                    if isinstance(error, MeshcastError):  # of a transfer
                        self._failed(number, error)
                        number += 1
                        continue
                    if not self._over:
                        log.warning(_SILENT, self._rank, f"their store has failed ({first_line(error)})")
                    return
                except Exception as error:
                    self._failed(number, error)
                    number += 1

    def _answer_now(self, number: int) -> None:
        found = self._buffers.whole()
        self._answer(number, found, lambda: found is not None and self._buffers.has(found[1]), None)


_SILENT = "rank %d: readers are not answered any longer: %s"


class _List:
    """A decision of the ranks that push in each push that has succeeded: that of the first of them."""

    def __init__(self, store: dist.Store, rank: int, job: str) -> None:
        self.questions = Questions(store, pushing=True)  # nothing waits in this connection
        self._rank, self._job, self._said = rank, job, ""
        self._fork_count = forks.count

    def agreed(self, version: int, proposal: Any, kind: Any) -> Any:
        """Returns the first proposal for a push."""
        said, self._said = self._said, f"pushes/{self._job}/{version}"
        if said:  # all ranks have been through that push
            self.questions.store.delete_key(said)
        text = self.questions.store.compare_set(self._said, "", pack(proposal, kind))
        return unpack(kind, text.decode())

    def ask(self, call: Callable[[], _T], deadline: float, what: str) -> _T:
        """call(), which uses the store and ends soon where that answers."""
        left = min(max(deadline - time.monotonic(), 0.0) + _SOON, CHOOSE)
        return within(left, call, what, Caller("WeightSync.push", self._rank, "readers"))

    def erase(self) -> None:
        """Nothing is agreed on any longer. Any thread."""
        said, self._said = self._said, ""

        def leave() -> None:
            with suppress(Exception):  # the store may have ended before
                self.questions.store.delete_key(said)

        if said and self._fork_count == forks.count:
            with suppress(RuntimeError):
                threading.Thread(target=leave, name="meshcast-store", daemon=True).start()


class Keeping(Offering):
    """A rank that pushes, and keeps a copy of its shards as they were pushed last: it offers that at any
    time. A copy that is being read stays, and is not offered again: it would else never be read where pushes
    come faster than that goes."""

    def __init__(self, store: dist.Store, rank: int, ranks: Iterable[int], job: str) -> None:
        super().__init__(store, Buffers(1, rank), rank, ranks, job, pushing=True)
        self._list = _List(store, rank, job)
        self._memory: dict[str, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []  # push may be called on any stream
        self._old = False  # a later version was pushed

    def stop(self, wait: float = 0.0) -> None:
        super().stop(wait)
        self._list.erase()
        self._buffers, self._memory = Buffers(1, self._rank), {}  # a copy is large

    def pushed(
        self,
        version: int,
        state: Mapping[str, torch.Tensor],
        served: dict[str, Target],
        still: Callable[[], bool],
        peers: bool,  # noqa: ARG002
        deadline: float,
    ) -> None:
        """A version is whole everywhere: it is kept. The rest as for Pushing."""
        if self._over:
            return
        try:
            self._old = self._list.ask(
                lambda: self._list.agreed(version, self._offers, bool),
                deadline,
                "keeping a version for readers",
            )
            if not self._old:
                self._keep(version, state, served, still)
        except Exception as error:
            if isinstance(error, DeadlineExceededError) and time.monotonic() >= deadline:
                return  # the push has used up its limit: what was kept stays
            log.warning(_SILENT, self._rank, f"version {version} is not kept: {first_line(error)}")
            self.stop()

    def _keep(
        self,
        version: int,
        state: Mapping[str, torch.Tensor],
        served: dict[str, Target],
        still: Callable[[], bool],
    ) -> None:
        buffer, kept = self._buffers.claim(), ReshardedState()
        self._buffers.tear(buffer)
        with torch.no_grad(), torch.inference_mode(False):  # else torch would not count writes to it
            for name, x in state.items():
                local, target, known = local_of(x), served[name], self._memory.get(name)
                if known is None or (known.shape, known.dtype, known.device) != (
                    local.shape,
                    target.dtype,
                    local.device,
                ):
                    known = torch.empty(local.shape, dtype=target.dtype, device=local.device)
                kept[name] = known.copy_(local)
        self._memory = dict(kept)
        devices = {x.device for x in kept.values() if x.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]
        if not still():  # no other rank knows: it offers nothing
            return
        self._buffers.fill(buffer, kept, kept, served, WeightStats(version, 0, 0, 0.0, 0.0))

    def _answer_now(self, number: int) -> None:
        found = None if self._old else self._buffers.whole()
        for event in self._copied:
            event.synchronize()
        self._answer(number, found, lambda: found is not None and self._buffers.has(found[1]), None)


class Pushing(_Answers):
    """A rank that pushes, and keeps no copy: it serves in its pushes, which wait for that."""

    def __init__(self, store: dist.Store, rank: int, ranks: Iterable[int], job: str) -> None:
        self._list = _List(store, rank, job)
        super().__init__(self._list.questions, rank, ranks, job)
        self._open: dict[int, float | None] = {}  # questions, and since when others could have answered them
        self._next = 1
        self._now: object = None  # stands for the version while it is served

    def stop(self, wait: float = 0.0) -> None:  # noqa: ARG002
        """Answers no longer."""
        if self._end():
            self._list.erase()

    def pushed(
        self,
        version: int,
        state: Mapping[str, torch.Tensor],
        served: dict[str, Target],
        still: Callable[[], bool],
        peers: bool,
        deadline: float,
    ) -> None:
        """A version is whole everywhere: it is sent to readers that wait for one. still(): whether the state
        is as it was when the push was called. peers: ranks have received it that answer as well. deadline: of
        the push. Nothing is served once this has returned."""
        holders = {rank for each in served.values() for rank in each.layout.ranks}
        if self._over or self._rank not in holders:
            return
        caller, stream = Caller("WeightSync.push", self._rank, "readers"), own_stream()
        self._now = now = object()
        found: _Whole = (version, state, served)

        def unchanged() -> bool:
            return self._now is now and still()

        def serve(numbers: Sequence[int]) -> None:
            with behind(stream):
                for number in numbers:
                    if self._now is not now:
                        return
                    try:
                        self._answer(number, found, unchanged, deadline, len(holders))
                    except MeshcastError as error:
                        self._failed(number, error)

        try:
            numbers = self._list.ask(lambda: self._chosen(version, peers), deadline, "looking for readers")
            if numbers:
                left = max(deadline - time.monotonic(), 0.0) + _SOON
                within(left, lambda: serve(numbers), "serving readers", caller)
        except DeadlineExceededError as late:
            if time.monotonic() < deadline:
                self._over = True
                log.warning(_SILENT, self._rank, first_line(late))
        except Exception as error:
            self._over = True
            log.warning(_SILENT, self._rank, first_line(error))
        finally:
            self._now = None
            meeting = self._meeting
            if meeting is not None:
                meeting.close()

    def _chosen(self, version: int, peers: bool) -> _Numbers:
        """The questions that this push answers, the same on all ranks that push."""
        questions, now = self._questions, time.monotonic()
        count = questions.asked()
        self._open.update(dict.fromkeys(range(max(self._next, count - KEPT + 1), count + 1)))
        self._next = count + 1
        mine = []
        for number, since in sorted(self._open.items()):
            text = questions.heard(f"ask/{number}")
            if text == "" or (text is None and number <= count - KEPT):
                del self._open[number]
            elif text and unpack(Ask, text).least <= version:
                self._open[number] = since = now if since is None else since
                if not peers or now - since > _PEERS:
                    mine.append(number)
        chosen: _Numbers = self._list.agreed(version, tuple(mine), _Numbers)
        for number in chosen:
            self._open.pop(number, None)
        return chosen
