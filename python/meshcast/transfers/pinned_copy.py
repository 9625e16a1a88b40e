"""Passage: how the tensors of one call get from this rank's GPU into host memory, or from there onto it.

The source is copied to pinned memory behind what the caller's current stream holds at the call; the host
starts the transfer when that has happened. What arrives is copied onto the GPU when the transfer is over, by
whoever asks first: wait(), is_completed(), or the next call that looks for memory. Both copies run on streams
of their own, so the caller's stream never waits for the host; wait() orders it behind the second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError
from .futures import call_back, fail
from .gpu_offer import CAPTURED, several_gpus
from .shards import Shards, filled

if TYPE_CHECKING:
    from .. import _C
    from .gpu_copies import Copies, Event
    from .pinned import PinnedPool

__all__ = ["LandingWork", "Passage"]

# Seconds between two looks at whether the GPU has copied the source: short for a GPU that is idle, longer
# for one that has other work to do first.
_SHORT_PAUSE, _LONG_PAUSE = 20e-6, 500e-6
_CAUSE_PAUSE = 0.02  # seconds between two looks in the store for a reason to give up


class Passage:
    """The tensors of one call as the transfer sees them: `src` and `dst`, on the host, empty ones None.

    rank: this one, for errors. on_gpu: whether the sources and the destinations of this call are on a GPU.
    Raises LayoutError for tensors on several GPUs and in a capture; MeshcastError where CUDA or its memory
    fails. All before anything else of the call has happened.
    """

    def __init__(
        self,
        copies: Copies,
        pool: PinnedPool,
        call: _C.Call,
        rank: int,
        src: Shards,
        dst: Shards,
        on_gpu: tuple[bool, bool],
    ) -> None:
        self._copies, self._op, self._rank = copies, call.op, rank
        self._deadline, self._limit = call.deadline, call.timeout
        self.src, self.dst = filled(src), filled(dst)
        self._left: Event | None = None  # behind the copy to the host
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # (on the GPU, on the host)
        sides = [side if there else [] for side, there in zip((self.src, self.dst), on_gpu, strict=True)]
        given = [tensor for side in sides for tensor in side if tensor is not None]
        if not given:
            return
        self._device = self._one_device(given)
        if copies.capturing():
            raise LayoutError(f"{call.op}: {CAPTURED}", rank=rank, op=call.op)
        try:
            self._behind = copies.mark(self._device)
            blocks = pool.lend([tensor.nbytes for tensor in given])
            lent = iter(blocks)
            leaving, self._arriving = (_moved(side, lent) for side in sides)
            if leaving:
                pairs = [(host, tensor) for tensor, host in leaving]
                self._left = copies.copy(self._device, pairs, self._behind)
        except Exception as error:  # of CUDA: the other ranks must hear of it
            raise MeshcastError(
                f"{call.op}: {sum(tensor.nbytes for tensor in given)} bytes could not be brought to pinned "
                f"host memory: {error}",
                rank=rank,
                op=call.op,
                phase="start",
            ) from error
        pool.watch(call, blocks)

    def _one_device(self, tensors: list[torch.Tensor]) -> int:
        devices = {tensor.device.index for tensor in tensors}
        if len(devices) > 1:
            raise LayoutError(f"{self._op}: {several_gpus(sorted(devices))}", rank=self._rank, op=self._op)
        return devices.pop()

    def has_left(self) -> bool:
        """Whether the source is in host memory, or there is none to bring there. Never raises."""
        try:
            return self._query()
        except Exception:  # leave() raises it
            return False

    def leave(self, cause: Callable[[], str | None]) -> None:
        """Returns once the source is in host memory. Raises DeadlineExceededError at the call's limit,
        AbortedError once there is a cause to give the call up, MeshcastError where CUDA fails."""
        rank, pause, asked = self._rank, _SHORT_PAUSE, time.monotonic()
        while not self._asked():
            now = time.monotonic()
            left = self._deadline - now
            given_up = None
            if now - asked > _CAUSE_PAUSE:
                given_up, asked = cause(), now
            if given_up is not None:
                raise AbortedError(
                    f"rank {rank}: {self._op}: the group was aborted while the GPU copied the source to the "
                    f"host: {given_up}",
                    rank=rank,
                    op=self._op,
                    phase="transfer",
                )
            if left <= 0:
                raise DeadlineExceededError(
                    f"rank {rank}: {self._op}: the GPU had not copied the source to the host within "
                    f"{self._limit:g} s: what its stream held before the call is not through; does it wait "
                    "for another rank?",
                    rank=rank,
                    op=self._op,
                    phase="transfer",
                    elapsed=self._limit - left,
                    limit=self._limit,
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONG_PAUSE)

    def _asked(self) -> bool:
        try:
            return self._query()
        except Exception as error:
            raise _failed(self._rank, self._op, "copying the source to the host", error) from error

    def _query(self) -> bool:
        return self._left is None or self._left.query()

    def landing(self, work: Any) -> Any:
        """The work of the call: that of the transfer, and the copy onto the GPU if there is one. A call that
        begins once more asks for another."""
        if not self._arriving:
            return work
        return LandingWork(
            work, self._copies, self._device, self._arriving, self._behind, self._rank, self._op
        )


class LandingWork:
    """The Work of a call whose results go onto a GPU once the transfer is over.

    wait() blocks the host until then, and orders the current stream behind the copy. is_completed(), and the
    future, tell that the GPU is through as well. Each of them enqueues the copy if nobody has.
    """

    def __init__(
        self,
        work: Any,
        copies: Copies,
        device: int,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        behind: Event,
        rank: int,
        op: str,
    ) -> None:
        self._rank, self._op = rank, op
        self._work, self._copies, self._device = work, copies, device
        self._pairs = pairs
        self._behind = behind  # earlier uses of the results' memory
        self._landed: Event | None = None
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
            self._work.wait()  # does not block any more; raises if the transfer failed
            return self._land().query()
        except Exception:  # wait() raises it
            return True

    def get_future(self) -> torch.futures.Future[None]:
        """Followed by a thread for callbacks: whoever ends a transfer must not wait for a GPU."""
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

    def _land(self) -> Event:
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
                self._pairs.clear()  # of the passage as well, which lives until the pool has looked at it
            return self._landed

    def _failed(self, error: Exception) -> MeshcastError:
        return _failed(self._rank, self._op, "copying what arrived onto the GPU", error)


def _failed(rank: int, op: str, what: str, error: Exception) -> MeshcastError:
    return MeshcastError(f"rank {rank}: {op}: {what} failed: {error}", rank=rank, op=op, phase="transfer")


def _moved(side: list[torch.Tensor | None], blocks: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Replaces the tensors of a side by memory of the blocks, and returns both."""
    pairs = []
    for index, tensor in enumerate(side):
        if tensor is not None:
            host = next(blocks)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            side[index] = host
            pairs.append((tensor, host))
    return pairs
