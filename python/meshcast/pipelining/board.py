"""Messages between the ranks of a pipeline outside the data path, in the store of their process group.

Except for `agree`, nothing is a collective: a rank publishes without waiting, and reads with a deadline that
names who is missing. A rank that found an error publishes that instead, so that the others raise at once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshcast import _C
from meshcast.base import forks
from meshcast.base.checks import runs_text
from meshcast.base.observe import Flight, Members
from meshcast.base.wire import pack, unpack
from meshcast.errors import AbortedError, Caller, DeadlineExceededError, MeshcastError, PeerLostError
from meshcast.groups.network import Network, interfaces
from meshcast.groups.parent import StoreConnection
from meshcast.groups.store import store_of_generation, within

__all__ = ["PipelineBoard", "Refused", "refusals_reported"]

_T = TypeVar("_T")
_TOLD = 5.0  # seconds in which a refusal of a constructor reaches the store, on a busy machine too
_LOOK = 0.25  # seconds between two checks of what may end a wait
_OVER = "over"  # topic of why a conversation is: a rank was lost, or refused to take part in it
_GRACE = 0.7  # seconds that the store is given beyond a limit, and to take a failure: Ctrl-C raises in one
_FAILED = "!"  # begins a message that is an error; no packed value begins so


class _Conversations:
    """The conversations of a group: one connection with the store for all of them, made when the first one
    begins."""

    def __init__(self, store: Any) -> None:
        self.connection = StoreConnection(store, "meshcast/pipeline", of_job=True)
        self.count = 0  # that were opened
        # Since the last one was opened: how often this rank began to make its stages, and which of them it
        # has made, or was refused, since it last did.
        self.attempt = 0
        self._made: set[int] = set()

    @staticmethod
    def of(group: Any) -> _Conversations:
        """Returns the conversations of a process group."""
        found = _conversations.get(group)
        if found is None:
            found = _conversations[group] = _Conversations(c10d._get_process_group_store(group))
        return found

    def begin_stage(self, index: int) -> None:
        """This rank makes a stage: one that it has made already begins another attempt."""
        if not self._made or index in self._made:
            self.attempt += 1
            self._made.clear()
        self._made.add(index)

    def begin_anew(self) -> None:
        """All attempts so far are over."""
        self.attempt = 0
        self._made.clear()


_conversations: weakref.WeakKeyDictionary[Any, _Conversations] = weakref.WeakKeyDictionary()


class Refused(Exception):  # noqa: N818  no error of its own: it never leaves the package
    """Carries the error of a call that was refused before data moved. Every rank of the pipeline gets one,
    and all may continue."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Over(NamedTuple):
    """The end of a conversation. attempt: of a rank that refused to take part; None for one that was lost."""

    peer: int
    error: str
    attempt: int | None


class _Settled(Exception):  # noqa: N818  no error: it ends the wait for the other ranks
    """An agreement has its answer before all ranks have come to it."""


class PipelineBoard:
    """One conversation of all ranks of a group. Every rank opens its conversations in the same order.

    A rank that was refused while it made its stages, or its schedule, ends the conversation that the others
    open then (`end`), and continues to the next. A rank that had given up that attempt by itself, before it
    opened a conversation, finds the end of one that it is past, by the number of the attempt, and continues
    to the next as well.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if not dist.is_initialized():
            raise Caller("pipeline").error(
                MeshcastError, "no process group; call torch.distributed.init_process_group first"
            )
        key: Any = dist.group.WORLD if group is None else group
        forks.check_group(key, "pipeline")
        self._fork_count = forks.count
        self.ranks = sorted(dist.get_process_group_ranks(key))
        self.rank = dist.get_rank()
        self._caller = Caller("pipeline", self.rank)
        self.timeout = timeout
        self.agreements = 0  # how many this rank has entered, or refused
        self._past: list[str] = []  # those that other ranks may still read
        self._published: set[str] = set()
        self._silent = False  # the store has left a call unanswered
        self._conversations = conversations = _Conversations.of(key)
        self._connection = conversations.connection
        # The ranks monitor each other through it.
        self._network = Network(interfaces()[0], timeout or 60.0)
        self._known = _C.KnownOffers()  # their offers for it, once all have come
        self._has_met = False
        self._watches = _C.Watches(self._known, self._network.watch)
        self._attempt = conversations.attempt
        while True:
            number = conversations.count
            conversations.count += 1
            self._conversation, ended = self._ask(
                lambda: self._open(number),  # noqa: B023  called here
                timeout,
                "connecting with the rendezvous store",
            )
            if ended is None or ended >= self._attempt:
                break
            self._attempt -= ended
        conversations.begin_anew()
        ranks = tuple(self.ranks)
        self._members = Members(runs_text(ranks), ranks, f"{key.group_name}/pipeline {number}")

    def _open(self, number: int) -> tuple[_C.Conversation, int | None]:
        """A conversation, and in which attempt it was ended, if it was."""
        store = store_of_generation(dist.PrefixStore(str(number), self._connection()), len(self.ranks))
        conversation = _C.Conversation(store, self.rank, len(self.ranks))
        conversation.say("here", self._network.offer())
        # A rank in its first attempt is past none.
        over = conversation.verdict(_OVER) if self._attempt else ""
        return conversation, unpack(_Over, over).attempt if over else None

    def _ask(self, call: Callable[[], _T], seconds: float, what: str) -> _T:
        """call(), which uses the store and ends by itself within so many seconds where that answers."""
        try:
            return within(
                seconds + _GRACE,
                call,
                what,
                Caller("pipeline", self.rank, "agree"),
                lambda: self._watches.lost_soon(self.ranks, self.rank),
            )
        except DeadlineExceededError as error:
            self._silent = self._silent or error.peer is None
            raise

    def _look(self) -> None:
        """For who waits: each rank looks after the next one, and notifies the others."""
        over = self._conversation.verdict(_OVER)
        if not over:
            lost = self._watches.lost(self._conversation, "here", self.ranks)
            if lost is None:
                return
            text = f"rank {self.rank} lost rank {lost[0]}: {lost[1]}"
            over = self._end(lost[0], text, None)
        peer, error, attempt = unpack(_Over, over)
        if attempt is None:
            error = f"rank {self.rank}: {error}. Look at that rank's own output first."
        raise (PeerLostError if attempt is None else AbortedError)(error, peer=peer, phase="agree")

    def _end(self, peer: int, error: str, attempt: int | None) -> str:
        return self._conversation.verdict(_OVER, pack(_Over(peer, error, attempt)))

    @property
    def opened(self) -> int:
        """The number of conversations that this rank has opened in the group."""
        return self._conversations.count

    def skip_to(self, opened: int) -> None:
        """Skips conversations that only other ranks have opened, and that all have left: the next one has the
        same number on all ranks."""
        self._conversations.count = max(self._conversations.count, opened)
        self._conversations.begin_anew()

    def end(self, message: str) -> None:
        """Makes all that other ranks wait for in this conversation fail with the message: this rank takes no
        part in it."""
        self._ask(lambda: self._end(self.rank, message, self._attempt), self.timeout, "telling of a refusal")

    def check_process(self) -> None:
        """Raises AbortedError in a forked child, which has no part in it."""
        forks.check(self._fork_count, "pipeline")

    def text_of(self, error: BaseException) -> str:
        """The text of an error of this rank, named as one of the pipeline, for all ranks."""
        if isinstance(error, Refused):
            error = error.error
        if isinstance(error, MeshcastError):
            self._caller.name(error)
            return str(error)
        return f"{self._caller}: {error}" if str(error) else f"{self._caller}: {type(error).__name__}"

    def publish(self, topic: str, value: Any) -> None:
        """value: of a class that `pack` knows, or a dict of what JSON can hold."""
        self._published.add(topic)
        self._ask(lambda: self._conversation.say(topic, _packed(value)), self.timeout, f"telling {topic!r}")

    def fail(self, topic: str, message: str, *, agreement: bool = False) -> None:
        """Says under `topic` that this rank has only an error. Its earlier texts there stay.

        agreement: it is one, which this rank has not entered, and fails on all ranks."""
        if topic in self._published or self._silent:
            return
        self._tell(topic, _FAILED + message, _FAILED + message if agreement else "")

    def _tell(self, topic: str, value: str, answer: str) -> None:
        """Publishes a value, and the answer of an agreement, without waiting for other ranks. Where the store
        does not answer, no rank gets them: the error of this rank is what the caller is to see."""
        self._published.add(topic)

        def tell() -> None:
            if answer:
                self._settle(topic, answer)
            if value:
                self._conversation.say(topic, value)

        with suppress(MeshcastError):
            self._ask(tell, 0.0, f"telling {topic!r}")

    def agree(self, topic: str, value: Any, decide: Callable[[dict[int, Any]], _T], kind: Any = Any) -> _T:
        """Every rank gives a value; the first one makes an answer of all, by rank, which all return.

        Three messages a rank, whatever the number of ranks. The error of `fail`, or of a rank that is
        interrupted here, is raised as AbortedError. A rank that refuses (`refuse`) makes the answer before
        the others have come.

        Args:
            value: as for `publish`.
            kind: the class of the answer, unless it is a dict.
        """
        flight = self._flight(topic)
        try:
            answer: _T = self._ask(
                lambda: unpack(kind, self._answer(topic, value, decide)),
                self.timeout,
                f"agreeing on {topic!r}",
            )
        except BaseException as error:
            flight.failed(error)
            if not isinstance(error, MeshcastError):  # of a handler of a signal
                self._tell(topic, "", f"{_FAILED}rank {self.rank}: {type(error).__name__}")
            raise
        flight.ended()
        return answer

    def refuse(
        self, topic: str, value: Any, decide: Callable[[dict[int, Any]], Any], error: BaseException
    ) -> None:
        """Takes part in an agreement with a value that decides it, and does not wait for the other ranks:
        they get what `decide` makes of this value alone when they come. error: why, for the record."""
        self._flight(topic).failed(error)
        self._tell(topic, _packed(value), _packed(decide({self.rank: value})))

    def _flight(self, topic: str) -> Flight:
        flight = Flight("pipeline", self._members, self.rank, topic, 0, self.agreements)
        self.agreements += 1
        self._past.append(topic)
        return flight

    def _settle(self, topic: str, answer: str) -> str:
        """The answer that counts: this one, or one given before."""
        return self._conversation.verdict(f"{topic}/answer", answer)

    def _answer(self, topic: str, value: Any, decide: Callable[[dict[int, Any]], Any]) -> str:
        begin = time.monotonic()
        deadline = begin + self.timeout
        self._published.add(topic)
        self._conversation.say(topic, _packed(value))
        if self.rank == self.ranks[0]:
            answer = self._settle(topic, self._decided(topic, deadline, type(value), decide))
        else:
            answer = self._conversation.await_verdict(f"{topic}/answer", deadline, self._look, _LOOK)
        if not answer:
            missing = self._conversation.silent(topic, self.ranks) or self.ranks[:1]  # it has not decided
            raise DeadlineExceededError(
                self._late(topic).replace("{missing}", str(missing)),
                peer=missing[0],
                phase="agree",
                elapsed=time.monotonic() - begin,
                limit=self.timeout,
            )
        if answer.startswith(_FAILED):
            raise AbortedError(answer.removeprefix(_FAILED), phase="agree")
        return answer

    def _decided(
        self, topic: str, deadline: float, kind: type, decide: Callable[[dict[int, Any]], Any]
    ) -> str:
        """Returns the decision on the values of all ranks; any text where there is an answer before that:
        other ranks may then never come."""

        def check() -> None:
            if self._conversation.verdict(f"{topic}/answer"):
                raise _Settled
            self._look()

        try:
            said = self._hear(topic, self.ranks, deadline, check)
        except _Settled:
            return _FAILED
        failed = next((text for text in said.values() if text.startswith(_FAILED)), None)
        return failed or _packed(decide({rank: unpack(_hint(kind), text) for rank, text in said.items()}))

    def forget_past(self) -> None:
        """Deletes what agreements before the last one have left in the store. Only after one that all ranks
        took part in: they have read those before."""
        for topic in self._past[:-1]:
            self.forget(topic)
        del self._past[:-1]

    def forget(self, topic: str) -> None:
        self._published.discard(topic)

        def forget() -> None:
            self._conversation.forget(topic)
            if self.rank == self.ranks[0] and topic in self._past:
                self._conversation.erase(f"{topic}/answer")

        self._ask(forget, self.timeout, f"forgetting {topic!r}")

    def collect(self, topic: str, kind: type[_T], ranks: Iterable[int] | None = None) -> dict[int, _T]:
        """Returns what `ranks` (all by default) published, of this class. Raises AbortedError with the
        message of a rank that failed, in rank order, and DeadlineExceededError naming the ranks that said
        nothing."""
        wanted = self.ranks if ranks is None else sorted(ranks)
        said = self._ask(lambda: self._collect(topic, wanted), self.timeout, f"reading {topic!r}")
        return {rank: unpack(kind, text) for rank, text in said.items()}

    def _collect(self, topic: str, wanted: list[int]) -> dict[int, str]:
        deadline = time.monotonic() + self.timeout
        if wanted == self.ranks and not self._has_met:
            self._known.add(self._hear("here", self.ranks, deadline, late=topic))
            self._has_met = True

        def check_failed(rank: int, text: str | None) -> None:
            if text is not None and text.startswith(_FAILED) and rank != self.rank:
                raise AbortedError(text.removeprefix(_FAILED), peer=rank, phase="agree")

        def check() -> None:  # the other ranks may be waiting for one that failed
            for rank in wanted:
                check_failed(rank, self._conversation.heard(topic, rank))
            self._look()

        said = self._hear(topic, wanted, deadline, check)
        for rank, text in said.items():
            check_failed(rank, text)
        return said

    def _hear(
        self,
        topic: str,
        ranks: Sequence[int],
        deadline: float,
        check: Callable[[], None] | None = None,
        late: str = "",
    ) -> dict[int, str]:
        """late: topic that an error names."""
        text = self._late(late or topic)
        return self._conversation.hear(
            topic, ranks, deadline, text, "pipeline", "agree", check or self._look, _LOOK
        )

    def _late(self, topic: str) -> str:
        return (
            f"rank {self.rank}: ranks {{missing}} of the pipeline did not reach {topic!r} within "
            f"{self.timeout:g} s; every rank of every "
            "stage makes its stage and schedule and calls step in the same order"
        )


def _hint(kind: type) -> Any:
    return Any if kind in (dict, list) else kind


def _packed(value: Any) -> str:
    return pack(value, _hint(type(value)))


@contextmanager
def refusals_reported(group: Any, index: int | None = None) -> Iterator[None]:
    """While a stage or a schedule is made: what this rank refuses is what the others read in the conversation
    that their schedules open, instead of waiting for this one's. index: of a stage."""
    # A rank that is not in the group shares no conversation with those that are.
    in_job = dist.is_initialized() and (group is None or isinstance(group, dist.ProcessGroup))
    if in_job and index is not None:
        with suppress(Exception):  # a group that is over: the next call raises that
            _Conversations.of(dist.group.WORLD if group is None else group).begin_stage(index)
    try:
        yield
    except Exception as cause:
        error = cause
        if not _is_of_python(cause):
            op = "pipeline" if index is None else "PipelineStage"
            error = Caller(op, dist.get_rank() if dist.is_initialized() else None).typed(cause)
        if in_job:
            with suppress(Exception):  # the refusal is what the caller is to see
                PipelineBoard(group, _TOLD).end(str(error))
        if error is cause:
            raise
        raise error from cause


def _is_of_python(error: Exception) -> bool:
    """Returns whether it is about the names of arguments: as everywhere in Python, that stays a TypeError."""
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
