"""One rank's side of a WeightSync: it gets ready with the others, and then moves a version with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..base import forks
from ..base.observe import call_site
from ..errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError, PlanMismatchError
from ..groups.parent import ParentGroup
from ..groups.ready_barrier import Late, ReadyBarrier
from ..groups.store import first_line, store_failed, within
from .state_again import Repeated
from .state_arguments import Given
from .state_batches import Batch
from .state_current import Current
from .state_results import Memory, ReshardedState
from .state_run import Conversation, Prepared
from .state_specs import OP
from .weight_buffers import Buffers, WeightProgress, WeightStats

__all__ = ["Side", "as_call_of"]

_OP = "WeightSync"
_TELL = 0.7  # seconds that the store gets to take why this rank ends: Ctrl-C raises in one
_READY = 0.5  # of a push's limit, for the others to get ready; the transfer has the rest


def as_call_of(op: str, error: Exception) -> Exception:
    """The error of the call inside, from now on one of this operation. What it says of other ranks' calls is
    of the whole."""
    if isinstance(error, MeshcastError):
        text = str(error).replace(OP, op, 1).replace(OP, _OP)
        error.args = (text if _OP in text else f"{op}: {text}",)
        error.op = op if error.op in (None, OP) else error.op
    return error


class Side:
    """Used by one thread at a time, but for `buffers`. state: of a rank that pushes, else None."""

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
        self._talk = Conversation(parent, {})
        self._op = f"{_OP}.{'push' if self.pushes else 'pull'}"
        self._batches: Sequence[Batch] = ()  # on their way
        self._left = ""  # why this rank ends
        self._born = forks.count

    def check(self) -> bool:
        """Raises LayoutError for arguments that are wrong by themselves. Returns whether this rank asks for
        tensors on a GPU."""
        prepared = self._prepared(None, None)
        if prepared.refused is not None:
            raise as_call_of(_OP, prepared.refused)
        call = prepared.call
        return call is not None and any(each.device_type == "cuda" for each in call.wanted.values())

    def _prepared(self, version: Any, memory: Memory | None) -> Prepared:
        """A call with the state, and the outputs, that are found now."""
        state = out = wrong = None
        try:
            state, out = self._now("state", self._state), self._now("out", self._out)
        except Exception as error:
            wrong = error
        return self._calls.prepared(state, out, version, memory, wrong)

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
        if not self._left and self._born == forks.count:
            self._left = f"rank {self.parent.rank} {why}"
            error = AbortedError(f"{_OP}: {self._left}", rank=self.parent.rank, op=_OP)
            self.end(AbortedError, self._left, error)

    def ask(self, call: Callable[[], None], seconds: float, what: str) -> None:
        """call(), which uses the store and ends by itself within so many seconds where that answers."""
        within(seconds + _TELL, call, f"{_OP}, {what}", self.barrier.gone, rank=self.parent.rank, op=_OP)

    def pushed(self, version: int, state: Any = None) -> None:
        """One push, within the limit. Blocks. Raises Late where other ranks were not ready in half of it.
        state: from now on, in place of the one before."""
        self._state = self._state if state is None else state
        begin, site = time.monotonic(), call_site()

        def settle() -> None:
            self.barrier.answer()
            self.barrier.verdict(begin + _READY * self.limit, self.leaving, site)

        self._together(lambda: self.ask(settle, _READY * self.limit, "getting ready"))
        self._moved(version, begin, begin + self.limit)

    def pulled(self, begin: float, deadline: float) -> None:
        """One version into this rank's only buffer. Blocks. Raises Late where there was none, or other ranks
        were not ready for it."""
        start, site = time.monotonic(), call_site()

        def check() -> None:
            if why := self.leaving():
                raise AbortedError(f"{_OP}: {why}", rank=self.parent.rank, op=_OP)

        def settle() -> None:
            if not self.barrier.await_call(deadline, check):
                raise Late(self.buffers.late(None, time.monotonic() - begin))
            self.barrier.answer()
            self.barrier.verdict(deadline, self.leaving, site)

        self._together(lambda: self.ask(settle, max(deadline - start, 0.0), "waiting for a push"))
        self._moved(None, start)

    def received(self) -> None:
        """Waits for a push, and takes part in it. For the thread that receives."""
        start = time.monotonic()

        def settle() -> None:
            nonlocal start
            self.barrier.wait_for_call()
            if self.leaving() or not self.barrier.called():
                raise Late(self.buffers.late(None, 0.0))
            start = time.monotonic()
            self.barrier.answer()
            self.barrier.verdict(None, self.leaving)

        with suppress(Late):
            self._together(settle)
            self._moved(None, start)

    def progress(self) -> WeightProgress | None:
        """Returns the progress of the version that is on its way; None where none is. Any thread."""
        found = [batch.progress() for batch in self._batches]
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
            failed = error if isinstance(error, MeshcastError) else self._store_failed(error)
            self._give_up(failed)
            if failed is error:
                raise
            raise failed from error
        except BaseException as raised:  # of a handler of a signal
            self._interrupted(raised)
            raise

    def _store_failed(self, error: Exception) -> MeshcastError:
        where: Any = {"rank": self.parent.rank, "op": _OP, "phase": "agree"}
        return store_failed(error, _OP, self.barrier.gone(), **where)

    def _moved(self, version: Any, start: float, deadline: float | None = None) -> None:
        """The transfer, which this rank has waited for since `start`; deadline: by default the limit, from
        now. Errors that all ranks have alike, in which nothing moved or what moved is known to be torn, leave
        everything in use; others end it."""
        try:
            self._move(version, start, deadline)
        except MeshcastError as error:
            as_call_of(self._op, error)
            if not (isinstance(error, LayoutError | PlanMismatchError) or type(error) is MeshcastError):
                self._give_up(error)
            raise
        except BaseException as raised:  # of a handler of a signal; or there is no memory
            self._interrupted(raised)
            raise

    def _move(self, version: Any, start: float, deadline: float | None) -> None:
        buffer = self.buffers.claim()
        try:
            begin = time.monotonic()
            result = ReshardedState()
            prepared = self._prepared(version, buffer.memory)
            if self.pushes and version is None:
                prepared.refused = prepared.refused or LayoutError(
                    f"{_OP}.push needs a version: an integer that grows", rank=self.parent.rank, op=self._op
                )
            if prepared.refused is not None:  # the others are told its text
                as_call_of(self._op, prepared.refused)
            _, made = self._calls.run(
                self._talk,
                prepared,
                begin + self.limit if deadline is None else deadline,
                result,
                buffer.memory,
                lambda: self.buffers.tear(buffer),
                self._moves,
            )
            assert result.version is not None  # each rank that pushes gives one
            each = [figures for call in made if (figures := call.figures()) is not None]
            sent, got = (
                sum(int(figures[name]) for figures in each) for name in ("bytes_sent", "bytes_received")
            )
            stats = WeightStats(result.version, sent, got, begin - start, time.monotonic() - begin)
        except BaseException:
            self.buffers.release()
            raise
        finally:
            self._moves(())
        self.buffers.fill(buffer, result, stats)

    def _moves(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def _interrupted(self, raised: BaseException) -> None:
        what = f"{type(raised).__name__}: {first_line(raised)}"
        self._left = f"rank {self.parent.rank} was interrupted by {what}"
        self._give_up(AbortedError(f"{_OP}: {self._left}", rank=self.parent.rank, op=_OP))

    def _give_up(self, error: MeshcastError) -> None:
        """The others may wait for this rank."""
        self.parent.abort(f"rank {self.parent.rank} gave up a push: {error}")
        self.end(AbortedError, str(error), error)

    def end(self, kind: type[MeshcastError], text: str, error: MeshcastError) -> None:
        """Ends everything on all ranks, with an error of this kind, and here with `error`. Takes a second at
        most."""
        self.buffers.end(error)
        told = threading.Event()

        def tell() -> None:
            with suppress(Exception):  # where the store does not answer, the others wait to their limits
                self.barrier.end(kind, text)
            told.set()

        try:
            threading.Thread(target=tell, name="meshcast-store", daemon=True).start()
        except RuntimeError:  # none is to be had, or the interpreter ends: this rank's own waits for it, too
            tell()
        told.wait(_TELL)
