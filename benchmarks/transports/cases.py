"""What is compared: the ways a message can take, and the sizes, counts and worlds that are measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONNECTS", "GROUPS", "SIZES", "WAYS", "Size", "Way"]


@dataclass(frozen=True)
class Way:
    """One way for bytes to get from process to process."""

    name: str
    what: str
    colour: str  # in the chart
    env: tuple[tuple[str, str], ...] = ()  # of its ranks
    backend: str = ""  # of torch.distributed, for its send and recv; "" for meshcast and MPI


WAYS = {
    "ucx": Way("meshcast, UCX", "`Resharder` between two hosts", "#1f5fa8", (("MESHCAST_TRANSPORT", "ucx"),)),
    "gloo": Way("meshcast, gloo", "the same over the second choice", "#9ecae9",
                (("MESHCAST_TRANSPORT", "gloo"),)),
    "torch": Way("torch, gloo", "`isend` and `irecv` of torch's backend gloo", "#f28e2b", backend="gloo"),
    "mpi": Way("Open MPI", "`MPI_Isend` and `MPI_Irecv`, `btl` tcp; it waits without sleeping", "#9c755f"),
    # Left to itself UCX takes shared memory, since its hosts are one machine here.
    "commux": Way("commux", "`isend` and `irecv` of its c10d backend over UCX's tcp",
                  "#59a14f", (("UCX_TLS", "tcp,self"),), backend="commux"),
}  # fmt: skip
"""In the order of the columns."""

_ROUND = 32 << 20  # bytes that a round moves each way, unless a limit of calls comes first
_CALLS = 200
_WINDOW = 8  # messages in flight
_IN_FLIGHT = 128 << 20  # bytes in flight


@dataclass(frozen=True)
class Size:
    """Of messages, in bytes, and how many of them a round has."""

    nbytes: int

    @property
    def trips(self) -> int:
        """There and back, one after the other."""
        return max(1, min(_CALLS, _ROUND // self.nbytes))

    @property
    def window(self) -> int:
        """Messages in flight in one direction."""
        return max(1, min(_WINDOW, _IN_FLIGHT // self.nbytes))

    @property
    def batches(self) -> int:
        """Windows in a round; the next one begins when all of the last have arrived."""
        return max(1, min(_CALLS, 2 * _ROUND // self.nbytes) // self.window)

    @property
    def name(self) -> str:
        kib = self.nbytes >> 10
        return f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"


SIZES = [Size(nbytes << 10) for nbytes in (4, 16, 64, 256, 1024, 4096, 16384, 65536)]
CONNECTS = (2, 8, 16, 32, 64)
"""Ranks that exchange something with each other for the first time."""
GROUPS = (1, 20, 100)
"""Private groups of two ranks that idle."""
