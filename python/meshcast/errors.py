"""Typed errors. Every error of meshcast says who (rank, peer), in what (op, sequence, phase) and when
(elapsed of limit).

A field is None where it does not apply. All classes derive from `MeshcastError`, which is a `RuntimeError`
and, where torch has it, a `torch.distributed.DistError`, so that handlers written for torch.distributed catch
them too. `LayoutError` is a `ValueError` as well, `DeadlineExceededError` a `TimeoutError` and
`PeerLostError` a `ConnectionError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "AbortedError",
    "Caller",
    "DeadlineExceededError",
    "LayoutError",
    "MeshcastError",
    "PeerLostError",
    "PlanMismatchError",
    "mark_reported",
    "was_reported",
]

E = TypeVar("E", bound="MeshcastError")
_Base: type[RuntimeError] = getattr(dist, "DistError", RuntimeError)


class MeshcastError(_Base):  # type: ignore[misc, valid-type]
    """Base of all errors of meshcast.

    Each field is None where it does not apply.

    Attributes:
        rank: that raises; a global rank.
        peer: that it was dealing with; a global rank.
        op: what was called: "reshard", "plan", "WeightSync.push", ...
        sequence: number of the call in its lane: calls of one kind that run one after the other.
        phase: "connect", "agree", "start", "transfer" or "wait".
        elapsed: seconds since the call was made.
        limit: seconds that the call had.
    """

    _fields: tuple[str, ...] = ("rank", "peer", "op", "sequence", "phase", "elapsed", "limit")

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        sequence: int | None = None,
        phase: str | None = None,
        elapsed: float | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.op = op
        self.sequence = sequence
        self.phase = phase
        self.elapsed = elapsed
        self.limit = limit

    def __reduce__(self) -> tuple[Callable[..., MeshcastError], tuple[Any, ...]]:
        # Errors cross processes (launchers, pools); the default would drop the keyword fields.
        return _rebuild, (type(self), str(self), {name: getattr(self, name) for name in self._fields})


def _rebuild(cls: type[MeshcastError], message: str, fields: dict[str, Any]) -> MeshcastError:
    return cls(message, **fields)


class LayoutError(MeshcastError, ValueError):
    """Bad shape, placement, mesh, rank, topology, option or file, found before anything was sent.

    Field in addition to those of `MeshcastError`: `gone`, where ranks were lost: a (name, box, ranks that had
    it) for each box that is wanted and that no rank holds any longer; else empty.
    """

    _fields = (*MeshcastError._fields, "gone")

    def __init__(
        self,
        message: str = "",
        *,
        gone: tuple[tuple[str, tuple[tuple[int, int], ...], tuple[int, ...]], ...] = (),
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.gone = gone


class PlanMismatchError(MeshcastError):
    """Ranks made the same call with different arguments; the message prints both sides."""


class DeadlineExceededError(MeshcastError, TimeoutError):
    """The call did not finish within its deadline; the message names the ranks waited for."""


class PeerLostError(MeshcastError, ConnectionError):
    """A peer died or closed its connection.

    Attributes:
        bytes_done: that this rank had received in the call, from all its peers.
        bytes_expected: that it receives in the whole call.
        address: of the peer.
    """

    _fields = (*MeshcastError._fields, "bytes_done", "bytes_expected", "address")

    def __init__(
        self,
        message: str = "",
        *,
        bytes_done: int | None = None,
        bytes_expected: int | None = None,
        address: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.bytes_done = bytes_done
        self.bytes_expected = bytes_expected
        self.address = address


class AbortedError(MeshcastError):
    """The group failed or was aborted before; the message carries the first cause."""


def mark_reported(error: BaseException) -> None:
    """Notes that the other ranks of the call know of this error, or need not."""
    error._meshcast_reported = True  # type: ignore[attr-defined]


def was_reported(error: BaseException) -> bool:
    return getattr(error, "_meshcast_reported", False)


class Caller:
    """The call that an error is about. Its errors begin with "reshard on rank 2: " and have its fields.

    Attributes:
        op: the public name of the call: "reshard", "WeightSync.push", ...
        rank: global rank of this process; None outside a job.
        phase: as in `MeshcastError`.

    Example: what checks raise inside the block needs neither the call nor the rank::

        with Caller("reshard", rank):
            raise LayoutError("placements are missing")  # reshard on rank 2: placements are missing
    """

    __slots__ = ("op", "phase", "rank")

    def __init__(self, op: str, rank: int | None = None, phase: str | None = None) -> None:
        self.op, self.rank, self.phase = op, rank, phase

    def __str__(self) -> str:
        return self.op if self.rank is None else f"{self.op} on rank {self.rank}"

    def error(self, kind: type[E], text: str, **facts: Any) -> E:
        """Returns an error of this call. facts: its other fields: peer, elapsed, limit, ..."""
        return kind(f"{self}: {text}", **{"rank": self.rank, "op": self.op, "phase": self.phase, **facts})

    def name(self, error: MeshcastError) -> None:
        """Makes `error` one of this call, unless it names another call already."""
        text = str(error)
        if error.op not in (None, self.op):
            return
        begins = text.startswith("rank ") and error.op is not None  # as errors of the transport do
        if not begins and not text.startswith(f"{self.op} on rank "):
            error.args = (f"{self}: {text.removeprefix(f'{self.op}: ')}", *error.args[1:])
        error.op = self.op
        error.rank = self.rank if error.rank is None else error.rank
        error.phase = self.phase if error.phase is None else error.phase

    def typed(self, error: Exception) -> Exception:
        """Returns the error that this call raises where its arguments caused `error`: a MeshcastError, but
        torch.OutOfMemoryError as it is, since programs expect that by its name."""
        if isinstance(error, torch.OutOfMemoryError):
            return error
        if isinstance(error, MeshcastError):
            self.name(error)
            return error
        text = (str(error).splitlines() or [""])[0]
        if isinstance(error, MemoryError) or "allocate memory" in text:
            return self.error(MeshcastError, f"there is not enough memory: {text}")
        return self.error(LayoutError, f"these arguments cannot be used: {type(error).__name__}: {text}")

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if isinstance(error, MeshcastError):
            self.name(error)
