"""The memory that versions of weights arrive in: while one is served, the next is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ..errors import AbortedError, Caller, DeadlineExceededError, MeshcastError
from .memory import note_written
from .state_entries import Memory, ReshardedState, Target

if TYPE_CHECKING:
    from .state_delta import Arrived

__all__ = ["Buffer", "Buffers", "WeightStats"]

_LOOK = 0.25  # seconds between two looks of a rank that waits for a version


@dataclass(frozen=True)
class WeightStats:
    """The cost of one version on this rank.

    Attributes:
        version: its number.
        bytes_sent, bytes_received: as `TransferStats` counts them.
        waited: seconds until all ranks were ready.
        seconds: from then until the version was whole on every rank.
        ratio: with ``delta=True``, bytes that travel once, for all their receivers, over those of whole
            tensors.
        whole: with ``delta=True``, what travelled whole, and why; "" where nothing did.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    waited: float
    seconds: float
    ratio: float = 1.0
    whole: str = ""


class Buffer:
    """Memory of one version. state: what the user gets, None while it is not whole, and the targets that it
    is in; torn: a version was in flight into it, and did not arrive. arrived: a version that the next one may
    be made of."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.state: ReshardedState | None = None
        self.arrived_as: ReshardedState | None = None  # the same, which no program has
        self.targets: dict[str, Target] = {}
        self.version = -1
        self.torn = False
        self.arrived: Arrived | None = None
        self._written: list[tuple[torch.Tensor, int]] = []
        self._uncounted = False

    def fill(
        self,
        state: ReshardedState,
        offers: Mapping[str, torch.Tensor] | None,
        targets: dict[str, Target],
        version: int,
    ) -> None:
        self.state, self.targets, self.version, self.torn = state, targets, version, False
        self.arrived_as = None if offers is None else ReshardedState(offers)
        # A DTensor and its local tensor count their writes apart.
        tensors = [x for x in (*state.values(), *(offers or {}).values()) if isinstance(x, torch.Tensor)]
        tensors += [x._local_tensor for x in tensors if isinstance(x, DTensor)]
        self._written = [(x, x._version) for x in tensors if not x.is_inference()]
        self._uncounted = len(self._written) < len(tensors)

    def is_as_it_arrived(self) -> bool:
        """Returns whether it is whole, and no one has written to it, as torch counts. It does not count
        writes to tensors made in inference mode."""
        counted = self.state is not None and not self._uncounted
        return counted and all(x._version == seen for x, seen in self._written)

    def tear(self) -> None:
        """It is about to be written. A call that reads it finds that it was."""
        note_written(*(x for x, _ in self._written))
        self.state, self.arrived_as, self.torn, self.arrived, self._written = None, None, True, None, []


class Buffers:
    """One or two buffers. Any thread. With two, the one that is served is never written."""

    def __init__(self, count: int, rank: int) -> None:
        self.stats: WeightStats | None = None
        self._caller = Caller("WeightSync", rank)
        self._buffers = [Buffer() for _ in range(count)]
        self._current: Buffer | None = None  # that is served
        self._newest: Buffer | None = None  # whole, and not yet served
        self._claimed: Buffer | None = None  # that a version is to arrive in
        self._refused: Exception | None = None  # of the last push, for the next take() to raise
        self._ended: MeshcastError | None = None
        self._changed = threading.Condition()

    def claim(self) -> Buffer:
        """The buffer for the next version. One at a time."""
        with self._changed:
            free = [each for each in self._buffers if each is not self._current] or self._buffers
            # A whole version that has not been taken gives way if the other one is being served.
            self._claimed = next((each for each in free if each is not self._newest), free[0])
            return self._claimed

    def tear(self, buffer: Buffer) -> None:
        """It is about to be written."""
        with self._changed:
            buffer.tear()
            if self._newest is buffer:
                self._newest = None

    def fill(
        self,
        buffer: Buffer,
        state: ReshardedState,
        offers: Mapping[str, torch.Tensor] | None,
        targets: dict[str, Target],
        stats: WeightStats,
        arrived: Arrived | None = None,
    ) -> None:
        """The version in it is whole. offers: what readers may be served of it, as these targets say; None:
        nothing."""
        with self._changed:
            buffer.fill(state, offers, targets, stats.version)
            buffer.arrived = arrived
            self._newest, self._claimed, self._refused = buffer, None, None
            self.stats = stats
            self._changed.notify_all()

    def whole(self) -> tuple[int, ReshardedState, dict[str, Target]] | None:
        """Returns the newest version that is as it arrived, for those that read it; None where none is. It
        may be written meanwhile, which shows in the versions that torch counts."""
        with self._changed:
            found = [each for each in self._buffers if each.arrived_as and each.is_as_it_arrived()]
            best = max(found, key=lambda each: (each is not self._claimed, each.version), default=None)
            if best is None or best.arrived_as is None:
                return None
            return best.version, best.arrived_as, best.targets

    def has(self, state: ReshardedState) -> bool:
        """Returns whether this, which whole() has returned, is as it arrived."""
        with self._changed:
            return any(each.arrived_as is state and each.is_as_it_arrived() for each in self._buffers)

    def base(self) -> Arrived | None:
        """Returns the newest version that is whole; None where that cannot be said of any."""
        with self._changed:
            whole = [each.arrived for each in self._buffers if each.arrived is not None]
            return max(whole, key=lambda arrived: arrived.version, default=None)

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
        """Nothing arrives any longer. The first cause counts."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """``True`` where nothing arrives any longer."""
        return self._ended is not None

    def check_open(self) -> None:
        """Raises where nothing can be pushed or pulled any longer: the first cause."""
        error = self._ended
        if isinstance(error, AbortedError):
            raise error.with_traceback(None)
        if error is not None:
            raise self._caller.error(AbortedError, f"it has failed before: {error}", peer=error.peer)

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
        raise self._caller.error(MeshcastError, text)

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
                notified = self._changed.wait(min(_LOOK, deadline - now))
            if not notified:
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
        why = "no rank has pushed one" if self._claimed is None else "a push is in flight and not complete"
        text = f"pull waited {elapsed:.1f} s for {what}: {why}"
        return self._caller.error(DeadlineExceededError, text, phase="wait", elapsed=elapsed, limit=elapsed)
