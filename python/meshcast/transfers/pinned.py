"""Transfers between a mesh on CPUs and one on GPUs.

Between ranks they are those of CPUs. A rank's shards on its GPU go through pinned host memory, which its
group keeps for later calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import AbortedError, Caller, DeadlineExceededError, LayoutError, MeshcastError
from .gpu import CAPTURED, several_gpus
from .handle import call_back, fail
from .medium import DeviceTypes, Medium, Shards, Started, Statistics, filled

if TYPE_CHECKING:
    from .. import _C
    from ..groups.private import PrivateGroup

__all__ = [
    "COPIES",
    "CudaCopies",
    "LandingWork",
    "HostStaging",
    "PinnedMedium",
    "PinnedPool",
]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (to, from)


class CudaCopies:
    """The part of CUDA that a staging uses, by torch; device: index of a GPU. Nothing but pinned() blocks the
    host. Each GPU has a stream for each direction, since it has a copy engine for each."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, bool], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8, not initialised."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def capturing(self) -> bool:
        """Returns whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def mark(self, device: int) -> torch.cuda.Event:
        """Behind all that the current stream of the device holds."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def copy(self, device: int, pairs: Pairs, after: torch.cuda.Event) -> torch.cuda.Event:
        """Enqueues copies behind `after`, all in one direction, between tensors of one shape and type, and
        returns the event behind them. The GPU's tensors may be freed at once, the pinned ones not."""
        to_host = pairs[0][0].is_cpu
        stream = self._stream(device, to_host)
        event = torch.cuda.Event()
        # In inference mode, tensors may be written whether made in it or not. device() comes first: stream()
        # alone puts a thread back on a GPU that it has never used, which then gets a context.
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(after)
            for to, from_ in pairs:
                to.copy_(from_, non_blocking=True)
                # Its memory comes from the caller's stream, and may go back there before this copy has run.
                (from_ if to_host else to).record_stream(stream)
            event.record(stream)
        return event

    def follow(self, device: int, event: torch.cuda.Event) -> None:
        """Lets what comes next in the current stream wait for the event."""
        torch.cuda.current_stream(device).wait_event(event)

    def _stream(self, device: int, to_host: bool) -> torch.cuda.Stream:
        with self._lock:
            stream = self._streams.get((device, to_host))
            if stream is None:
                stream = self._streams[device, to_host] = torch.cuda.Stream(device)
            return stream


COPIES = CudaCopies()


_LEAST = 4096  # bytes of a block


class PinnedPool:
    """Blocks of pinned memory, in sizes that are powers of two, so that tensors of any shape share them.

    Pinning costs far more than a copy: a block is allocated once, lent to one call at a time, and lent again
    when that call no longer needs it on the host and on the GPU. Those of a call that failed are given up:
    something may still write to them. Thread-safe.
    """

    def __init__(self, pinned: Callable[[int], torch.Tensor]) -> None:
        self._pinned = pinned  # allocates so many bytes
        self._free: dict[int, list[torch.Tensor]] = {}
        self._loans: list[tuple[_C.Call, list[torch.Tensor]]] = []
        self._lock = threading.Lock()

    def lend(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """A block of at least so many bytes for each size. They are the pool's again if they come with
        watch(); else they are freed with their last reference."""
        with self._lock:
            self._collect()
            return [self._block(size) for size in sizes]

    def watch(self, call: _C.Call, blocks: list[torch.Tensor]) -> None:
        """The blocks are the call's until it has ended, on the GPU as well."""
        with self._lock:
            self._loans.append((call, blocks))

    def abort(self, reason: str) -> None:
        """Nothing: the calls that failed are distinguished when memory is collected."""

    def close(self) -> None:
        """Nothing: blocks end with their last reference."""

    def _collect(self) -> None:
        in_use = []
        for call, blocks in self._loans:
            if not call.is_completed():
                in_use.append((call, blocks))
            elif _succeeded(call):
                for block in blocks:
                    self._free.setdefault(block.numel(), []).append(block)
        self._loans = in_use

    def _block(self, size: int) -> torch.Tensor:
        rounded = max(_LEAST, 1 << (size - 1).bit_length())
        free = self._free.get(rounded)
        return free.pop() if free else self._pinned(rounded)


def _succeeded(call: _C.Call) -> bool:
    """Returns whether a call that has ended succeeded."""
    if call.error is not None:
        return False
    try:
        call.work.wait()  # does not block any longer
    except Exception:
        return False
    return True


# Seconds between two checks whether the GPU has copied the source: short for a GPU that is idle, longer for
# one that has other work to do first.
_SHORT_PAUSE, _LONG_PAUSE = 20e-6, 500e-6
_CAUSE_PAUSE = 0.02  # seconds between two checks of the store for a reason to give up


class HostStaging:
    """The tensors of one call as the transfer sees them: `src` and `dst`, on the host, empty ones None.

    rank: this one, for errors. on_gpu: whether the sources and the destinations of this call are on a GPU.
    Raises LayoutError for tensors on several GPUs and in a capture; MeshcastError where CUDA or its memory
    fails. All before anything else of the call has happened.
    """

    def __init__(
        self,
        copies: CudaCopies,
        pool: PinnedPool,
        call: _C.Call,
        rank: int,
        src: Shards,
        dst: Shards,
        on_gpu: tuple[bool, bool],
    ) -> None:
        self._copies, self._caller = copies, Caller(call.op, rank, "transfer")
        self._deadline, self._limit = call.deadline, call.timeout
        self.src, self.dst = filled(src), filled(dst)
        self._left: torch.cuda.Event | None = None  # behind the copy to the host
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # (on the GPU, on the host)
        sides = [side if there else [] for side, there in zip((self.src, self.dst), on_gpu, strict=True)]
        given = [tensor for side in sides for tensor in side if tensor is not None]
        if not given:
            return
        self._device = self._one_device(given)
        if copies.capturing():
            raise LayoutError(CAPTURED)
        try:
            self._behind = copies.mark(self._device)
            blocks = pool.lend([tensor.nbytes for tensor in given])
            lent = iter(blocks)
            leaving, self._arriving = (_moved(side, lent) for side in sides)
            if leaving:
                pairs = [(host, tensor) for tensor, host in leaving]
                self._left = copies.copy(self._device, pairs, self._behind)
        except Exception as error:  # of CUDA: the other ranks must learn of it
            nbytes = sum(tensor.nbytes for tensor in given)
            raise MeshcastError(
                f"{nbytes} bytes could not be brought to pinned host memory: {error}", phase="start"
            ) from error
        pool.watch(call, blocks)

    def _one_device(self, tensors: list[torch.Tensor]) -> int:
        devices = {tensor.device.index for tensor in tensors}
        if len(devices) > 1:
            raise LayoutError(several_gpus(sorted(devices)))
        return devices.pop()

    def has_left(self) -> bool:
        """Returns whether the source is in host memory, or there is none to bring there. Never raises."""
        try:
            return self._query()
        except Exception:  # leave() raises it
            return False

    def leave(self, cause: Callable[[], str | None]) -> None:
        """Returns once the source is in host memory. Raises DeadlineExceededError at the call's limit,
        AbortedError once there is a cause to give the call up, MeshcastError where CUDA fails."""
        pause, asked = _SHORT_PAUSE, time.monotonic()
        while not self._asked():
            now = time.monotonic()
            left = self._deadline - now
            given_up = None
            if now - asked > _CAUSE_PAUSE:
                given_up, asked = cause(), now
            if given_up is not None:
                text = f"the group was aborted while the GPU copied the source to the host: {given_up}"
                raise self._caller.error(AbortedError, text)
            if left <= 0:
                raise self._caller.error(
                    DeadlineExceededError,
                    f"the GPU had not copied the source to the host within {self._limit:g} s: what its "
                    "stream held before the call is not complete; does it wait for another rank?",
                    elapsed=self._limit - left,
                    limit=self._limit,
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONG_PAUSE)

    def _asked(self) -> bool:
        try:
            return self._query()
        except Exception as error:
            raise _failed(self._caller, "copying the source to the host", error) from error

    def _query(self) -> bool:
        return self._left is None or self._left.query()

    def landing(self, work: Any) -> Any:
        """The work of the call: that of the transfer, and the copy onto the GPU if there is one. A call that
        begins once more asks for another."""
        if not self._arriving:
            return work
        return LandingWork(work, self._copies, self._device, self._arriving, self._behind, self._caller)


class LandingWork:
    """The Work of a call whose results go onto a GPU once the transfer is over.

    wait() blocks the host until then, and orders the current stream behind the copy. is_completed(), and the
    future, report that the GPU is done as well. The first of them enqueues the copy.
    """

    def __init__(
        self,
        work: Any,
        copies: CudaCopies,
        device: int,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        behind: torch.cuda.Event,
        caller: Caller,
    ) -> None:
        self._caller = caller
        self._work, self._copies, self._device = work, copies, device
        self._pairs = pairs
        self._behind = behind  # earlier uses of the results' memory
        self._landed: torch.cuda.Event | None = None
        self._problem: MeshcastError | None = None
        self._lock = threading.Lock()

    def wait(self) -> bool:
        self._work.wait()
        landed = self._land()
        try:
            self._copies.follow(self._device, landed)
        except Exception as error:
            raise self._failed(error) from error
        return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()  # does not block any longer; raises if the transfer failed
            return self._land().query()
        except Exception:  # wait() raises it
            return True

    def get_future(self) -> torch.futures.Future[None]:
        """Followed by a thread for callbacks: the thread that ends a transfer must not wait for a GPU."""
        future: torch.futures.Future[None] = torch.futures.Future()

        def follow() -> None:
            try:
                self._work.wait()
                self._land().synchronize()
            except Exception as error:
                fail(future, error)
            else:
                future.set_result(None)

        call_back(follow)
        return future

    def _land(self) -> torch.cuda.Event:
        """The event behind the copy onto the GPU. Only once the transfer has succeeded."""
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self._landed is None:
                try:
                    self._landed = self._copies.copy(self._device, self._pairs, self._behind)
                except Exception as error:
                    self._problem = self._failed(error)
                    raise self._problem from error
                self._pairs.clear()  # also of the staging, which lives until the pool has checked it
            return self._landed

    def _failed(self, error: Exception) -> MeshcastError:
        return _failed(self._caller, "copying what arrived onto the GPU", error)


def _failed(caller: Caller, what: str, error: Exception) -> MeshcastError:
    return caller.error(MeshcastError, f"{what} failed: {error}")


def _moved(side: list[torch.Tensor | None], blocks: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Replaces the tensors of a side by memory of the blocks, and returns both."""
    pairs = []
    for index, tensor in enumerate(side):
        if tensor is not None:
            host = next(blocks)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            side[index] = host
            pairs.append((tensor, host))
    return pairs


class PinnedMedium(Medium):
    """One end of the transfer is on GPUs."""

    by_host = True

    def __init__(self, group: PrivateGroup, device_types: DeviceTypes) -> None:
        self._group, self._device_types = group, device_types

    def bring(self, call: _C.MediumCall, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        source, destination = (kind == "cuda" for kind in self._device_types)
        on_gpu = (destination, source) if reverse else (source, destination)
        group, copies = self._group, COPIES
        pool = group.attached("pinned")
        if not isinstance(pool, PinnedPool):
            pool = PinnedPool(copies.pinned)
            group.attach("pinned", pool)
        staging = call.brought = HostStaging(copies, pool, call, group.rank, src, dst, on_gpu)
        if call.driven:  # a waiting caller spares the group's thread, and others its lock
            try:
                staging.leave(group.cause)
            except MeshcastError as error:
                group.abort(str(error))
                raise
        return staging.src, staging.dst

    def ready(self, call: _C.MediumCall) -> bool:
        return bool(call.brought.has_left())

    def start(
        self, core: _C.GroupCore, call: _C.MediumCall, agreed: _C.AgreedPlan, **arguments: Any
    ) -> Started:
        staging: HostStaging = call.brought
        try:
            staging.leave(self._group.cause)
        except MeshcastError as error:
            core.abort(str(error))  # the others have started it
            raise
        arguments["timeout"] = max(call.remaining(), 1e-3)
        work = core.start(agreed, **arguments)
        return staging.landing(work), Statistics(work)

    def text(self) -> str:
        return f"; from {self._device_types[0]} to {self._device_types[1]}"
