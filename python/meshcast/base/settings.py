"""The environment variables that meshcast reads: each has one row here, which says all there is to say of it.

docs/environment.md has the table of `markdown()`; `python -m meshcast doctor` shows those that are set.
This file and host.py are also loaded where the rest of meshcast cannot be: they import nothing of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One variable. expected: its values, as errors name them; read: when; meaning: one or two sentences."""

    name: str
    default: str
    expected: str
    read: str
    meaning: str

    def text(self) -> str:
        """The value, stripped; the default where it is unset or empty."""
        return os.environ.get(self.name, "").strip() or self.default

    def choice(self, *allowed: str) -> str:
        """The value if it is one of `allowed`. Raises MeshcastError."""
        if self.text() not in allowed:
            self._refuse()
        return self.text()

    def integer(self, low: int, high: int, op: str | None = None) -> int:
        """The value as a number within [low, high]. Raises MeshcastError, which names `op`."""
        value = self.text()
        if not value.isascii() or not value.isdecimal() or not low <= int(value) <= high:
            self._refuse(op)
        return int(value)

    def _refuse(self, op: str | None = None) -> None:
        from ..errors import MeshcastError

        raise MeshcastError(f"{self.name} is {self.text()!r}; expected {self.expected}", op=op)


BROADCAST_BYTES = Setting(
    "MESHCAST_BROADCAST_BYTES",
    str(1 << 20),
    "the number of bytes, 1 or more, from which a broadcast is a multicast, the same on all ranks",
    "a group of backend meshcast is made",
    "Broadcasts of so many bytes and more are multicasts, smaller ones gloo's (backend.md).",
)
CUDA_TRANSPORT = Setting(
    "MESHCAST_CUDA_TRANSPORT",
    "auto",
    "auto, nccl or cuda_ipc, the same on all ranks",
    "a group first moves tensors on GPUs",
    "How ranks exchange tensors on GPUs (cuda.md).",
)
FLIGHT_RECORD = Setting(
    "MESHCAST_FLIGHT_RECORD",
    "",
    "a path",
    "`import meshcast`",
    "Each rank writes its last 2,000 calls to PATH.rankN when a call fails, an exception ends the program, "
    "and on SIGUSR1 (stuck_jobs.md).",
)
HOST_ID = Setting(
    "MESHCAST_HOST_ID",
    "",
    "any text, the same on the ranks that share a host",
    "a group is made",
    "Takes the place of what is found out: ranks with equal texts are taken to share memory and NICs.",
)
IFNAMES = Setting(
    "MESHCAST_IFNAMES",
    "",
    "different interfaces of this host, separated by commas",
    "a group is made",
    "The interfaces whose NICs share the traffic, equally many on every rank; else those "
    "that transports.md says.",
)
LOG = Setting(
    "MESHCAST_LOG",
    "",
    "debug, info, warning or error",
    "`import meshcast`",
    "Shows the log on stderr from this level on; else `meshcast` is an ordinary logger.",
)
SHM = Setting(
    "MESHCAST_SHM",
    "1",
    "0, which turns shared memory off, or 1, which leaves it on",
    "a group is made",
    "Whether the ranks of a host exchange data through shared memory.",
)
SHM_MB = Setting(
    "MESHCAST_SHM_MB",
    "64",
    f"a number of MiB from 1 to {1 << 20}",
    "a group is made",
    "What one process maps at most for all its groups, in MiB.",
)
TRANSPORT = Setting(
    "MESHCAST_TRANSPORT",
    "auto",
    "auto, ucx or gloo, the same on all ranks",
    "a group is made",
    "How hosts exchange messages, and send and recv of backend meshcast; auto is UCX where it can be loaded, "
    "else gloo (transports.md, backend.md).",
)
UCX = Setting(
    "MESHCAST_UCX",
    "auto",
    "auto, wheel, system or the path of a libucp.so.0",
    "the first group is made",
    "Which UCX is loaded; auto is the system's where the machine has RDMA devices and it can use them, else "
    "the wheel's (transports.md).",
)

ALL = (BROADCAST_BYTES, CUDA_TRANSPORT, FLIGHT_RECORD, HOST_ID, IFNAMES, LOG, SHM, SHM_MB, TRANSPORT, UCX)


def markdown() -> str:
    """The table of docs/environment.md: `python -m meshcast.base.settings` prints it."""
    head = ["| variable | values | default | read when | meaning |", "|---|---|---|---|---|"]
    rows = [
        (f"`{each.name}`", each.expected, each.default or "unset", each.read, each.meaning) for each in ALL
    ]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    print(markdown())
