"""One rank's side of a WeightSync: it gets ready with the others, and then moves a version with them.

A rank has the version that it serves, and the next one; a thread receives weights while it serves others.
Modules give their tensors other memory (offloading, `to()`, a checkpoint that is assigned), so that each call
finds the state anew.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..base import checks, forks
from ..base.observe import call_site, log
from ..errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError, PlanMismatchError
from ..groups.parent import ParentGroup
from ..groups.ready_barrier import Late, ReadyBarrier
from ..groups.store import first_line, no_thread, store_failed, within
from .state_arguments import Given
from .state_batches import Batch
from .state_dict import Repeated
from .state_entries import OP
from .state_run import Conversation, Memory, Prepared, ReshardedState, behind, own_stream

__all__ = [
    "Buffer",
    "Buffers",
    "Current",
    "Receiver",
    "Side",
    "State",
    "WeightProgress",
    "WeightStats",
    "as_call_of",
]


State = Mapping[str, Any] | torch.nn.Module | Callable[[], Mapping[str, Any]]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Owner = tuple[weakref.ref[Any], str]  # an object, and its attribute or the name of its parameter or buffer


class Current:
    """A state that may get other memory between calls.

    given: {name: entry}, a module, whose state_dict() is taken at each look, or a function that returns a
    mapping, which is called at each look. Entries of a mapping that share the memory of a module's parameters
    or buffers, as those of its state_dict() do, stand for these: where the module has its tensor in other
    memory by now, the look finds that one. None: no entries.

    Raises LayoutError for anything else.
    """

    def __init__(self, what: str, given: Any) -> None:
        self._what, self.given = what, given
        self._entries: dict[str, Any] = {}  # of the mapping, as they were when it last changed
        self._memories: dict[str, Any] = {}
        self._owners: dict[str, list[_Owner]] = {}
        module = isinstance(given, torch.nn.Module)
        self._ask: Callable[[], Any] | None = None
        if module or (callable(given) and not isinstance(given, Mapping)):
            self._ask = given.state_dict if module else given
        elif given is not None:
            self.look()

    def look(self) -> Mapping[str, Any]:
        """The state as it is now. Raises what the function raises, and LayoutError where it returns no
        mapping."""
        given = self.given if self._ask is None else self._ask()
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise LayoutError(
                f"{self._what} must be a mapping by name, a module or a function that returns a mapping, "
                f"found {checks.shown(given)}"
            )
        return given if self._ask is not None else self._followed(given)

    def _followed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        memories = {name: _memory(x) for name, x in given.items() if isinstance(x, torch.Tensor)}
        # Only of entries that the user has changed: the owners of others may have moved since.
        changed = {
            name: memory
            for name, memory in memories.items()
            if self._entries.get(name) is not given[name] or self._memories[name] != memory
        }
        if changed or len(memories) < len(self._memories):
            self._entries, self._memories = {name: given[name] for name in memories}, memories
            kept = {n: own for n, own in self._owners.items() if n in memories and n not in changed}
            self._owners = kept | _owners(self._entries, changed)
        moved = {}
        for name, owners in self._owners.items():
            plain = not isinstance(given[name], DTensor)
            for owner in owners:
                tensor = _tensor_of(owner)
                # In the place of FSDP2's shards a module has the whole parameters now and then.
                if tensor is not None and isinstance(tensor, DTensor) != plain:
                    if _memory(tensor) != memories[name]:
                        moved[name] = tensor.detach()
                    break
        return {**given, **moved} if moved else given


def _tensor_of(owner: _Owner) -> torch.Tensor | None:
    holder, name = owner[0](), owner[1]
    if isinstance(holder, torch.nn.Module):
        found: Any = holder._parameters.get(name)
        found = holder._buffers.get(name) if found is None else found
    else:
        found = getattr(holder, name, None)
    return found if isinstance(found, torch.Tensor) else None


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one piece of memory; None for those without memory of their own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _PLAIN or local.layout is not torch.strided:
        return None
    first = local.data_ptr()  # 0 without elements, and on the meta device
    return (first, local.dtype, local.shape, local.stride()) if first else None


def _owners(entries: Mapping[str, Any], memories: Mapping[str, Any]) -> dict[str, list[_Owner]]:
    """Returns what has the entries' memory as its own, by name. Reads all objects of the process once."""
    names: dict[Any, list[str]] = {}
    for name, memory in memories.items():
        if memory is not None:
            names.setdefault(memory, []).append(name)
    found: dict[str, list[_Owner]] = {}
    if names:
        for holder, attribute, tensor in _held():
            for name in names.get(_memory(tensor), ()):
                if isinstance(tensor, DTensor) == isinstance(entries[name], DTensor):
                    found.setdefault(name, []).append((weakref.ref(holder), attribute))
    return found


def _held() -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The parameters and buffers of all modules, then the shards that FSDP2 keeps of parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    kept = (fsdp.FSDPParam,) if fsdp is not None else ()
    sharded = []
    for each in gc.get_objects():
        kind = type(each)  # isinstance() would ask proxies, which may do anything
        if issubclass(kind, torch.nn.Module):
            for tensors in (each.__dict__.get("_parameters"), each.__dict__.get("_buffers")):
                for name, tensor in (tensors or {}).items():
                    if isinstance(tensor, torch.Tensor):
                        yield each, name, tensor
        elif issubclass(kind, kept):
            sharded.append(each)
    for each in sharded:
        tensor = getattr(each, "sharded_param", None)
        if isinstance(tensor, torch.Tensor):
            yield each, "sharded_param", tensor


_OP = "WeightSync"
_LOOK = 0.25  # seconds between two looks for ranks that have gone


@dataclass(frozen=True)
class WeightStats:
    """The cost of one version on this rank.

    Attributes:
        version: its number.
        bytes_sent, bytes_received: as `TransferStats` counts them.
        waited: seconds until all ranks were ready.
        seconds: from then until the version was whole on every rank.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    waited: float
    seconds: float


@dataclass(frozen=True)
class WeightProgress:
    """The progress of the version that is on its way. Values on GPUs count once their transfer is complete.

    Attributes:
        bytes_done: that this rank has sent and received of it.
        bytes_expected: that it will in all; 0 until the first one is planned.
    """

    bytes_done: int
    bytes_expected: int


class Buffer:
    """Memory of one version. state: what the user gets, None while it is not whole; torn: a version was on
    its way into it, and did not arrive."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.state: ReshardedState | None = None
        self.version = -1
        self.torn = False


class Buffers:
    """One or two buffers. Any thread. With two, the one that is served is never written."""

    def __init__(self, count: int, rank: int) -> None:
        self.stats: WeightStats | None = None
        self._rank = rank
        self._buffers = [Buffer() for _ in range(count)]
        self._current: Buffer | None = None  # that is served
        self._newest: Buffer | None = None  # whole, and not yet served
        self._claimed: Buffer | None = None  # that a version is to arrive in
        self._refused: Exception | None = None  # of the last push, for the next take() to tell
        self._ended: MeshcastError | None = None
        self._changed = threading.Condition()

    def claim(self) -> Buffer:
        """The buffer for the next version. One at a time."""
        with self._changed:
            free = [each for each in self._buffers if each is not self._current] or self._buffers
            # A whole version that nobody has taken gives way where the other one is being served.
            self._claimed = next((each for each in free if each is not self._newest), free[0])
            return self._claimed

    def tear(self, buffer: Buffer) -> None:
        """It is about to be written."""
        with self._changed:
            buffer.state, buffer.torn = None, True
            if self._newest is buffer:
                self._newest = None

    def fill(self, buffer: Buffer, state: ReshardedState, stats: WeightStats) -> None:
        """The version in it is whole."""
        with self._changed:
            buffer.state, buffer.version, buffer.torn = state, stats.version, False
            self._newest, self._claimed, self._refused = buffer, None, None
            self.stats = stats
            self._changed.notify_all()

    def release(self) -> None:
        """Nothing arrived in what was claimed."""
        with self._changed:
            self._claimed = None
            self._changed.notify_all()

    def refuse(self, error: Exception) -> None:
        """The next take() raises it, unless a newer version comes first."""
        with self._changed:
            self._refused = error
            self._changed.notify_all()

    def end(self, error: MeshcastError) -> None:
        """Nothing arrives any more. The first cause counts."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """``True`` where nothing arrives any more."""
        return self._ended is not None

    def check_open(self) -> None:
        """Raises where nothing can be pushed or pulled any more: the first cause."""
        error = self._ended
        if isinstance(error, AbortedError):
            raise error.with_traceback(None)
        if error is not None:
            raise AbortedError(f"{_OP} has failed before: {error}", rank=self._rank, peer=error.peer, op=_OP)

    def version(self) -> int | None:
        """Returns the version that is served; None where no whole one is."""
        with self._changed:
            current = self._current
            return None if current is None or current.torn else current.version

    def state(self) -> ReshardedState:
        with self._changed:
            current = self._current
            if current is not None and current.state is not None:
                return current.state
        text = "no version has been pulled yet"
        if current is not None:
            text = (
                f"the weights are torn: a push into them has begun and did not end, after version "
                f"{current.version}. They are served again once a pull has succeeded"
            )
        raise MeshcastError(f"rank {self._rank}: {_OP}: {text}", rank=self._rank, op=_OP)

    def take(self, wanted: int | None, deadline: float, look: Callable[[], None] = lambda: None) -> int:
        """Makes the newest whole version current, once there is one, and one as new as `wanted`. Returns the
        number of what is current then. look(): called now and then while it waits."""
        begin = time.monotonic()
        while True:
            with self._changed:
                found = self._taken(wanted)
                if found is not None:
                    return found
                now = time.monotonic()
                if now >= deadline:
                    raise self.late(wanted, now - begin)
                told = self._changed.wait(min(_LOOK, deadline - now))
            if not told:
                look()

    def _taken(self, wanted: int | None) -> int | None:
        newest, current, least = self._newest, self._current, -1 if wanted is None else wanted
        if newest is not None and newest is not self._claimed and newest.version >= least:
            self._current, self._newest = newest, None
            return newest.version
        served = current is not None and not current.torn and current.version >= least
        if current is not None and served and wanted is not None:
            return current.version
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error.with_traceback(None)
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        return current.version if current is not None and served else None

    def late(self, wanted: int | None, elapsed: float) -> DeadlineExceededError:
        what = "any version" if wanted is None else f"version {wanted} or a newer one"
        why = "nobody has pushed one" if self._claimed is None else "a push is on its way, and not through"
        return DeadlineExceededError(
            f"rank {self._rank}: {_OP}.pull waited {elapsed:.1f} s for {what}: {why}",
            rank=self._rank,
            op=_OP,
            phase="wait",
            elapsed=elapsed,
            limit=elapsed,
        )


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
        now. Errors that all ranks have, in which nothing moved or what moved is known to be torn, leave
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


class Receiver:
    """Takes part in every push. Between two it waits in the rendezvous store, on a connection of its own, and
    needs no CPU time."""

    def __init__(self, side: Side, on_gpu: bool) -> None:
        """on_gpu: it receives there, behind what the stream of this thread holds by then."""
        self._side = side
        gpu = on_gpu and torch.cuda.is_available()
        self._stream = torch.cuda.current_stream() if gpu else own_stream()
        self._thread = threading.Thread(target=self._run, name="meshcast-weights", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            rank = self._side.parent.rank
            raise no_thread("a WeightSync receives", rank=rank, op=_OP, phase="start") from error

    def join(self, seconds: float) -> None:
        """Waits until it has ended, after Side.leave() and Side.end()."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        side = self._side
        with behind(self._stream):
            while not side.leaving() and not side.buffers.over:
                try:
                    side.received()
                except Exception as error:
                    log.warning("rank %d: %s: %s", side.parent.rank, _OP, error)
                    if not side.buffers.over:  # the next pull raises it, and pushes go on
                        side.buffers.refuse(error)
