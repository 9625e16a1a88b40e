"""WeightSync: versions of a model's weights, pushed by ranks that train and pulled by those that serve.

A rank has the version that it serves, and the next one; a thread receives weights while it serves others.
Each push first gets ready with all ranks, and then moves a version with them. Modules give their tensors
other memory (offloading, `to()`, a checkpoint that is assigned), so that each call finds the state again.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import Self, Unpack

from ..base import checks, forks
from ..base.observe import call_site, log
from ..errors import (
    AbortedError,
    Caller,
    DeadlineExceededError,
    LayoutError,
    MeshcastError,
    PlanMismatchError,
)
from ..groups.parent import ParentGroup, parent_group, seconds
from ..groups.ready_barrier import Late, ReadyBarrier
from ..groups.store import first_line, no_thread, store_failed, within
from .memory import storage_of
from .meshes import lost_ranks
from .recorded import RecordedDestinations
from .state_arguments import Current, Given, State, receiving
from .state_background import behind, own_stream
from .state_dict import StateOptions, Where
from .state_entries import local_of
from .state_run import Conversation, Memory, Repeated, ReshardedState, StateRun
from .weight_buffers import Buffers, WeightStats

if TYPE_CHECKING:
    from .state_delta import Earlier
    from .weight_offers import Keeping, Offering, Pushing

__all__ = ["WeightProgress", "WeightStats", "WeightSync"]


_OP = "WeightSync"


@dataclass(frozen=True)
class WeightProgress:
    """The progress of the version that is in flight. Values on GPUs count once their transfer is complete.

    Attributes:
        bytes_done: that this rank has sent and received of it.
        bytes_expected: that it will in all; 0 until the first one is planned.
    """

    bytes_done: int
    bytes_expected: int


_TELL = 0.7  # seconds that the store gets to take why this rank ends: Ctrl-C raises in one
_READY = 0.5  # of a push's limit, for the others to get ready; the transfer has the rest


class _Side:
    """Used by one thread at a time, except for `buffers`. state: of a rank that pushes, else None."""

    def __init__(
        self,
        parent: ParentGroup,
        barrier: ReadyBarrier,
        given: Given,
        state: Any,
        out: Any,
        buffers: Buffers,
        limit: float,
    ) -> None:
        """parent: a twin, whose private groups nothing else uses. limit: of a transfer, seconds."""
        self.parent, self.barrier, self.buffers, self.limit = parent, barrier, buffers, limit
        self.pushes = state is not None
        self._state, self._out = state, out
        self._states: dict[str, Current] = {}
        self._calls = Repeated(parent.rank, given)
        self._earlier = _nothing_earlier() if given.delta else None
        self._conversation = Conversation(parent, {}, [number for number, _ in given.lost])
        self._op = f"{_OP}.{'push' if self.pushes else 'pull'}"
        self._caller = Caller(_OP, parent.rank)
        self._run: StateRun | None = None  # in flight
        self._thread: threading.Thread | None = None  # takes part in every push
        self._left = ""  # why this rank ends
        self.serving: Keeping | Pushing | None = None  # of a rank that pushes, for readers
        self._fork_count = forks.count

    def check(self) -> tuple[bool, bool]:
        """Raises LayoutError for arguments that are wrong by themselves. Returns whether this rank receives,
        and whether it asks for tensors on a GPU."""
        run = self._prepared(_OP, None, None)
        if run.refused is not None:
            raise run.refused
        wanted, rank = run.checked.side.wanted.values(), self.parent.rank
        landings = run.checked.side.recorded.values()
        receives = any(each.layout is None or rank in each.layout.ranks for each in wanted)
        devices = {each.device_type for each in wanted} | {each.device_type for each in landings}
        return receives or bool(landings), "cuda" in devices

    def _prepared(
        self, op: str, version: Any, memory: Memory | None, wrong: Exception | None = None
    ) -> StateRun:
        """A call with the state, and the outputs, that are found now. op: that its errors name."""
        state = out = None
        try:
            state, out = self._now("state", self._state), self._now("out", self._out)
        except Exception as error:
            wrong = error
        return self._calls.prepared(state, out, version, memory, wrong, op)

    def _now(self, what: str, given: Any) -> Any:
        known = self._states.get(what)
        if known is None or known.given is not given:
            known = self._states[what] = Current(what, given)
        return known.look()

    def leaving(self) -> str:
        """Returns why this rank takes no part in anything that has not begun; "" while it does."""
        return self._left or ("its process group was destroyed" if self.parent.closed else "")

    def leave(self, why: str) -> None:
        """Ends everything on all ranks, since this one goes. Takes a second at most."""
        if not self._left and self._fork_count == forks.count:
            self._left = f"rank {self.parent.rank} {why}"
            self.end(AbortedError, self._left, self._caller.error(AbortedError, self._left))

    def forget(self) -> None:
        """Gives up what it keeps of the last version. Nothing begins any longer."""
        self._earlier = None

    def ask(self, call: Callable[[], None], seconds: float, what: str) -> None:
        """call(), which uses the store and ends by itself within so many seconds where that answers."""
        within(seconds + _TELL, call, what, Caller(_OP, self.parent.rank, "agree"), self.barrier.gone)

    def pushed(self, version: int, state: Any = None) -> None:
        """One push, within the limit. Blocks. Raises Late where other ranks were not ready in half of it.
        state: from now on, instead of the one before."""
        self._state = self._state if state is None else state
        begin, site = time.monotonic(), call_site()

        def settle() -> None:
            self.barrier.answer()
            self.barrier.verdict(begin + _READY * self.limit, self.leaving, site)

        self._together(lambda: self.ask(settle, _READY * self.limit, "getting ready"))
        run = self._moved(version, begin, begin + self.limit)
        if self.serving is not None:
            written = {storage_of(local_of(out)) for out in run.checked.outs.values()}
            held = {
                name: x
                for name, x in run.checked.tensors.items()
                if name in run.served and storage_of(local_of(x)) not in written
            }
            names = list(held)
            self.serving.pushed(
                version,
                held,
                run.served,
                lambda: not run.changed(names),
                bool(run.received),
                begin + self.limit,
            )

    def pulled(self, begin: float, deadline: float) -> None:
        """One version into this rank's only buffer. Blocks. Raises Late where there was none, or other ranks
        were not ready for it."""
        start, site = time.monotonic(), call_site()

        def check() -> None:
            if why := self.leaving():
                raise self._caller.error(AbortedError, why)

        def settle() -> None:
            if not self.barrier.await_call(deadline, check):
                raise Late(self.buffers.late(None, time.monotonic() - begin))
            self.barrier.answer()
            self.barrier.verdict(deadline, self.leaving, site)

        self._together(lambda: self.ask(settle, max(deadline - start, 0.0), "waiting for a push"))
        self._moved(None, start)

    def receive(self, on_gpu: bool) -> None:
        """Starts a thread that takes part in every push. Between two it waits in the rendezvous store, on a
        connection of its own, and needs no CPU time. on_gpu: it receives there, behind what the stream of
        this thread holds by then."""
        gpu = on_gpu and torch.cuda.is_available()
        stream = torch.cuda.current_stream() if gpu else own_stream()
        thread = threading.Thread(target=self._receive, args=(stream,), name="meshcast-weights", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise no_thread("receiving", Caller(_OP, self.parent.rank, "start")) from error
        self._thread = thread

    def join(self, seconds: float) -> None:
        """Waits until nothing is received any longer, after leave() and end()."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _receive(self, stream: torch.cuda.Stream | None) -> None:
        with behind(stream):
            while not self.leaving() and not self.buffers.over:
                try:
                    with suppress(Late):
                        self._moved(None, self._wait_for_push())
                except Exception as error:
                    log.warning("rank %d: %s: %s", self.parent.rank, _OP, error)
                    if not self.buffers.over:  # the next pull raises it, and pushes continue
                        self.buffers.refuse(error)

    def _wait_for_push(self) -> float:
        """Returns the time at which the push that this rank is ready for was called."""
        start = time.monotonic()

        def settle() -> None:
            nonlocal start
            self.barrier.wait_for_call()
            if self.leaving() or not self.barrier.called():
                raise Late(self.buffers.late(None, 0.0))
            start = time.monotonic()
            self.barrier.answer()
            self.barrier.verdict(None, self.leaving)

        self._together(settle)
        return start

    def progress(self) -> WeightProgress | None:
        """Returns the progress of the version that is in flight; None where none is. Any thread."""
        run = self._run
        found = [batch.progress() for batch in ([] if run is None else run.batches)]
        return (
            WeightProgress(sum(done for done, _ in found), sum(all_ for _, all_ in found)) if found else None
        )

    def look(self) -> None:
        """For who waits for a version: whether those that push are still there."""
        with suppress(DeadlineExceededError):  # the store does not answer: the limit of the wait holds
            self.ask(lambda: self.barrier.look_after(self.barrier.callers()), 0.0, "looking after ranks")

    def _together(self, settle: Callable[[], None]) -> None:
        """Waits with the other ranks until all are ready. Any error but Late ends everything."""
        try:
            settle()
        except Late:
            raise
        except (dist.DistError, OSError) as error:
            if self.barrier.ended is not None:  # the others know
                self.buffers.end(self.barrier.ended)
                raise
            if isinstance(error, MeshcastError):
                self._give_up(error)
                raise
            caller = Caller(_OP, self.parent.rank, "agree")
            failed = store_failed(error, "a push", self.barrier.gone(), caller)
            self._give_up(failed)
            raise failed from error
        except BaseException as raised:  # of a handler of a signal
            self._interrupted(raised)
            raise

    def _moved(self, version: Any, start: float, deadline: float | None = None) -> StateRun:
        """The transfer, which this rank has waited for since `start`; deadline: by default the limit, from
        now. Returns its call. Errors that all ranks have, in which nothing moved or what moved is known to be
        torn, leave everything in use; others end it."""
        buffer, begin = self.buffers.claim(), time.monotonic()
        wrong = None
        if self.pushes and version is None:
            wrong = LayoutError("a push needs a version: an integer that grows")
        try:
            run = self._run = self._prepared(self._op, version, buffer.memory, wrong)
            run.moving = lambda: self.buffers.tear(buffer)
            run.earlier = earlier = self._earlier
            if earlier is not None:
                earlier.base = self.buffers.base()
            result = self._conversation.run(run, begin + self.limit if deadline is None else deadline)
        except BaseException as raised:
            self.buffers.release()
            if not isinstance(raised, MeshcastError):  # of a handler of a signal; or there is no memory
                self._interrupted(raised)
            elif not (isinstance(raised, LayoutError | PlanMismatchError) or type(raised) is MeshcastError):
                self._give_up(raised)
            raise
        finally:
            self._run = None
        assert result.version is not None  # each rank that pushes gives one
        each = [figures for call in run.made if (figures := call.figures()) is not None]
        sent, got = (sum(int(figures[name]) for figures in each) for name in ("bytes_sent", "bytes_received"))
        stats = WeightStats(result.version, sent, got, begin - start, time.monotonic() - begin)
        if earlier is not None:
            stats = replace(stats, ratio=earlier.ratio, whole=earlier.whole)
        arrived = None if earlier is None else earlier.arrived
        self.buffers.fill(buffer, result, run.offers, run.received, stats, arrived)
        return run

    def _interrupted(self, raised: BaseException) -> None:
        what = f"{type(raised).__name__}: {first_line(raised)}"
        self._left = f"rank {self.parent.rank} was interrupted by {what}"
        self._give_up(self._caller.error(AbortedError, self._left))

    def _give_up(self, error: MeshcastError) -> None:
        """The others may wait for this rank."""
        self.parent.abort(f"rank {self.parent.rank} gave up a push: {error}")
        self.end(AbortedError, str(error), error)

    def end(self, kind: type[MeshcastError], text: str, error: MeshcastError) -> None:
        """Ends everything on all ranks, with an error of this kind, and here with `error`. Takes a second at
        most."""
        self.buffers.end(error)
        notified = threading.Event()

        def tell() -> None:
            with suppress(Exception):  # where the store does not answer, the others wait to their limits
                self.barrier.end(kind, text)
            notified.set()

        try:
            threading.Thread(target=tell, name="meshcast-store", daemon=True).start()
        except RuntimeError:  # none is to be had, or the interpreter ends: this rank's own waits for it, too
            tell()
        notified.wait(_TELL)


def _nothing_earlier() -> Earlier:
    from .state_delta import Earlier

    return Earlier()


_JOIN = 2.5  # seconds that a version in flight gets when this rank ends
_LARGEST = (1 << 62) - 1  # version


class WeightSync:
    """Versions of a model's weights, from ranks that train to ranks that serve, while both continue. In a
    ``with`` statement it is closed at the end; an error in the block ends it on all ranks, with that cause.

    Constructed by every rank of `group`, at any time: no rank waits for another there. Ranks that give
    a state push; the others receive. A push and its transfers are independent of all other calls of the
    process group: connections are its own, and no order with other calls is needed.

    **push** reads the tensors of the state where they are by then and keeps no copy. It first makes sure,
    through the rendezvous store, that every rank is ready, and only then moves anything.

    **With two buffers** a thread of each receiving rank writes a version into the buffer that is not served.
    Such a rank is always ready, unless it is stuck or frozen. A version that was not pulled is replaced by
    the next one. **With one buffer** `pull` itself writes into the weights that are served, so a push waits
    for every such rank to be in `pull`. Each rank has as many buffers as it likes. A rank that pushes and is
    in a destination as well receives in its `push`. Onto a GPU the thread writes behind what the stream of
    the constructor's caller holds: read the weights on that stream.

    Args:
        state: {name: entry} of a rank that pushes, as the state_dict of reshard_state_dict; None elsewhere.
            Or a module, whose state_dict() each push sends, or a function that returns a mapping, which the
            constructor and each push call. Entries that share the memory of a module's parameters or buffers,
            as those of its state_dict() do, follow these into other memory: where the module is offloaded and
            loaded, converted, or assigned a checkpoint. If dtypes or shapes change by that, all ranks agree
            on it in the push.
        destinations, options: as for reshard_state_dict.
        group: whose ranks all take part.
        buffers: 1 or 2 copies of what this rank receives. They are made when they are first needed.
        timeout: seconds that a push may take, half of them until the others are ready, and that a pull waits
            for a version; by default the group's.
        delta: versions travel as their changes since the one before, where these are smaller, and arrive with
            the same bits. Each rank that pushes keeps a copy of what it sends. The same on all ranks; not
            with ``quantize=``.
        out: with one buffer, {name: tensor} to receive into, as for reshard_state_dict: the weights of a
            model that serves. A module, a function, and entries that share a module's memory: as for `state`.
        lost: ranks of the group that are dead, or take no part: they are in no destination, and construct
            none. The same on all ranks. After the loss of a rank that serves, the others continue with it.
        readers: a store in which processes outside the group ask for versions, with `WeightReader`; given on
            all ranks. Each rank that receives answers them, in a thread of its own, with the newest whole
            version that it has. Where none can, the ranks that push serve those that wait in their next
            `push`, once its version is whole, within its limit. So there may be no destinations.
        keep: ranks that push keep a copy of what they hold, as it was pushed last, and serve it to readers
            from a thread of their own: no push waits for a reader, and no reader for a push. The same on all
            ranks that push.

    Raises:
        LayoutError: a wrong argument. The other ranks then get PlanMismatchError from their next push or
            pull.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        trains = dist.get_rank() in (0, 1)
        weights = {"w": distribute_tensor(torch.zeros(4, 2), training, [Shard(0)])}
        with meshcast.WeightSync(weights if trains else None, {"w": (serving, [Shard(1)])}) as sync:
            for version in (1, 2):
                if trains:
                    weights["w"].add_(1)  # a step of the optimiser
                    sync.push(version)
                else:
                    newest = sync.pull(version)  # or a later one
                    assert bool((sync.state["w"].to_local() == newest).all())
    """

    def __init__(
        self,
        state: State | None,
        destinations: Mapping[str, Where] | RecordedDestinations | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        buffers: int = 2,
        timeout: float | timedelta | None = None,
        out: State | None = None,
        delta: bool = False,
        lost: Iterable[int] = (),
        readers: dist.Store | None = None,
        keep: bool = False,
        **options: Unpack[StateOptions],
    ) -> None:
        self._fork_count = forks.count
        self._parent = parent = parent_group(group, _OP)
        self._name = f"WeightSync {next(parent.extras.setdefault(_OP, itertools.count()))}"
        self._turn = threading.Lock()  # of pushes and of pulls into the only buffer
        self._closed = False
        self._answers: list[Offering | Pushing] = []  # of readers
        wrong: Exception | None = None
        limit, count = parent.timeout, 1
        dead: tuple[int, ...] = ()
        try:
            dead = lost_ranks(lost, parent.rank)
            if outside := [rank for rank in dead if rank not in parent.ranks]:
                raise LayoutError(f"lost= names ranks {outside}, which are not in the group")
            limit = seconds(timeout, parent.timeout)
            count = checks.integer("buffers", buffers, 1, 2)
            into = {} if destinations is None else receiving(destinations, None)[1]
            recorded = isinstance(destinations, RecordedDestinations) and destinations.receives
            if (out is not None or into or recorded) and count == 2:
                raise LayoutError(
                    f"{'out=' if out is not None else 'destinations'} has the only buffer; pass buffers=1 "
                    f"with it{', or (mesh, placements) instead of tensors' if into else ''}"
                )
            out = into or None if out is None else out
            if not isinstance(delta, bool):
                raise LayoutError(f"delta={checks.shown(delta)}: expected True or False")
            if delta and options.get("quantize") is not None:
                raise LayoutError(
                    "delta=True with quantize=, whose values all change with their scales; give one of them"
                )
            if readers is not None and not isinstance(readers, dist.Store):
                raise LayoutError(f"readers={checks.shown(readers)}: expected a torch.distributed.Store")
            if not isinstance(keep, bool) or (keep and readers is None):
                raise LayoutError(f"keep={checks.shown(keep)}: expected True or False, and readers= with it")
            named = tuple((each, each) for each in dead)
            more: Any = {"delta": delta, "lost": named, "lost_any": True, "readers": readers is not None}
            given = Given(None, destinations, **more, **options)
        except Exception as error:
            wrong, given = Caller(_OP, parent.rank).typed(error), Given(None, None)
        twin = parent.twin(self._name)
        ranks, within = [rank for rank in parent.ranks if rank not in dead], twin.full_name
        barrier = ReadyBarrier(self._name, twin.store, ranks, parent.rank, limit, within)
        self._buffers = Buffers(count, parent.rank)
        self._limit, self._one = limit, count == 1
        self._side = _Side(twin, barrier, given, state, out, self._buffers, limit)
        job = f"{time.time_ns():020} {os.urandom(8).hex()}"
        keeps = str(keep)  # of the first rank that pushes

        def connect() -> None:
            nonlocal job, keeps
            barrier.open(state is not None)
            if readers is not None:  # no other thread uses the barrier yet
                job = barrier.agreed("job of readers", job)
                if state is not None:
                    keeps = barrier.agreed("keep= of ranks that push", keeps)

        self._side.ask(connect, limit, "connecting with the rendezvous store")
        try:
            if wrong is not None:
                raise wrong
            if keeps != str(keep):
                text = f"keep={keep}, but keep={keeps} on another rank that pushes; give all of them the same"
                raise Caller(_OP, parent.rank).error(LayoutError, text)
            receives, on_gpu = self._side.check()
            if state is None and not self._one:
                self._side.receive(on_gpu)
            if readers is not None:
                stream = torch.cuda.current_stream() if on_gpu else own_stream()
                quantizes = options.get("quantize") is not None  # readers get what the ranks receive
                self._answer(readers, receives, not quantizes, keep, job, stream)
        except MeshcastError as error:
            for each in self._answers:
                each.stop()
            self._side.end(PlanMismatchError, f"rank {parent.rank} refused its arguments: {error}", error)
            raise
        side, answers = self._side, self._answers

        def end(why: str) -> None:
            for each in answers:
                each.stop()
            side.leave(why)
            side.join(_JOIN)

        parent.at_end[self._name] = partial(end, "has destroyed its process group")
        weakref.finalize(self, _dropped, side, answers, parent.at_end, self._name).atexit = False

    def _answer(
        self,
        readers: dist.Store,
        receives: bool,
        serves: bool,
        keep: bool,
        job: str,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Begins to answer readers, as far as this rank has a part in that."""
        from .weight_offers import Keeping, Offering, Pushing

        rank, ranks = self._parent.rank, self._parent.ranks
        if receives:
            self._answers.append(Offering(readers, self._buffers, rank, ranks, job))
        if self._side.pushes and serves:
            self._side.serving = (Keeping if keep else Pushing)(readers, rank, ranks, job)
            self._answers.append(self._side.serving)
        for each in self._answers:
            each.start(stream, self._limit)

    def push(self, version: int, state: State | None = None) -> None:
        """Sends the state as it is now to every rank that asks for it. Returns once it is whole there: the
        tensors may be changed again. They may not be while it runs. A rank that needs exactly this version
        pulls it by its number: the newest may change a moment later.

        version: 0 or more, larger than that of every earlier push, and the same on all ranks that push.
        state: sent instead of the one before, by this push and later ones.

        Raises:
            DeadlineExceededError: a rank was not ready within half of the limit; the error names it. Nothing
                was moved, the older versions stay as they are, and a later push may succeed.
            PlanMismatchError, LayoutError: versions, names, tensors or destinations do not fit, on all ranks.
                Nothing was moved, and a later push may succeed.
            MeshcastError: the state was changed while it travelled: no rank has this version.
            PeerLostError, AbortedError, or DeadlineExceededError of a transfer: the WeightSync has failed on
                all ranks, which keep what they serve.
        """
        self._check("push")
        if not self._side.pushes:
            caller = Caller(f"{_OP}.push", self._parent.rank)
            raise caller.error(LayoutError, "this rank gave no state, so it receives: call pull()")
        with self._taking_turns("push"):
            self._buffers.check_open()
            try:
                self._side.pushed(version, state)
            except Late as late:
                raise late.error from None

    def pull(self, version: int | None = None) -> int:
        """Makes the newest whole version current, and returns its number. `state` has its tensors.

        With two buffers it waits where there is no version at all, or none as new as `version`. The tensors
        of the version that was current before are then written again by later pushes. With one buffer it
        takes part in the next push, unless what is current is as new as `version`.

        Raises:
            DeadlineExceededError: there was no such version within the limit.
            PlanMismatchError, LayoutError, MeshcastError: a push was refused or interrupted; raised once.
                With two buffers, and where it was refused, what is current stays so.
            PeerLostError, AbortedError: the WeightSync has failed or was closed, here or on another rank.
        """
        self._check("pull")
        begin = time.monotonic()
        with Caller(f"{_OP}.pull", self._parent.rank):
            wanted = None if version is None else checks.integer("version", version, 0, _LARGEST)
        deadline = begin + self._limit
        if self._side.pushes or not self._one:
            return self._buffers.take(wanted, deadline, self._side.look)
        with self._taking_turns("pull"):
            current = self._buffers.version()
            while current is None or wanted is None or current < wanted:
                self._buffers.check_open()
                if self._pulled(begin, deadline):
                    current = self._buffers.take(None, deadline)
                    wanted = current if wanted is None else wanted
            return current

    @property
    def state(self) -> ReshardedState:
        """The current version: {name: tensor} as reshard_state_dict returns it, with its `version`. It is not
        written while it is current, except with one buffer.

        Raises MeshcastError where nothing was pulled yet, and with one buffer where a push has begun to write
        and did not end: the weights are torn, until a later pull has succeeded."""
        return self._buffers.state()

    @property
    def version(self) -> int | None:
        """The number of the current version; None where `state` raises."""
        return self._buffers.version()

    @property
    def stats(self) -> WeightStats | None:
        """Bytes and seconds of the last version that this rank pushed, or received whole. None before."""
        return self._buffers.stats

    @property
    def progress(self) -> WeightProgress | None:
        """Bytes of the version that is in flight, to or from this rank; None while nothing moves. For any
        thread, while another is in push or pull."""
        return self._side.progress()

    def __repr__(self) -> str:
        return f"<{self._name} of group {self._parent.name!r}{', closed' if self._closed else ''}>"

    def close(self) -> None:
        """Ends it on all ranks: pushes, and pulls that would have to wait, raise AbortedError. The current
        version stays usable. Waits a few seconds at most, for a version that is in flight."""
        forks.check(self._fork_count, f"{_OP}.close")
        if self._closed:
            return
        self._closed = True
        for each in self._answers:
            each.stop(_JOIN)
        self._side.leave("has closed it")
        limit = time.monotonic() + _JOIN
        self._side.join(_JOIN)
        self._parent.at_end.pop(self._name, None)
        self._parent.drop_twin(self._name, limit)
        self._side.join(_JOIN)  # a version in flight for longer is aborted by now
        self._side.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self._side.leave(f"has left its block with {type(error).__name__}: {first_line(error)}")
        self.close()

    def _check(self, what: str) -> None:
        forks.check(self._fork_count, f"{_OP}.{what}")

    @contextmanager
    def _taking_turns(self, what: str) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._limit):
            text = f"another thread of this rank was at it for {self._limit:g} s"
            caller = Caller(f"{_OP}.{what}", self._parent.rank, "wait")
            raise caller.error(DeadlineExceededError, text, limit=self._limit)
        try:
            yield
        finally:
            self._turn.release()

    def _pulled(self, begin: float, deadline: float) -> bool:
        """Tries to pull a version. Returns whether one has come; else there is time for another try."""
        try:
            self._side.pulled(begin, deadline)
        except Late as late:
            if time.monotonic() >= deadline:
                raise late.error from None
            return False
        return True


def _dropped(side: _Side, answers: list[Offering | Pushing], at_end: dict[str, Any], name: str) -> None:
    """Ends one that was not closed. Its connections end with the process group: this may be any thread."""
    at_end.pop(name, None)
    for each in answers:
        each.stop()
    side.leave("has dropped it")
