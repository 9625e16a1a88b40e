"""Stands in for a cluster where none can be built: all ranks on this machine's loopback, told which host
they are to think they are on. No link has a rate, so nothing that is measured there is a figure."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from .owner import owner_name


@dataclass
class Loopback:
    """The parts of Cluster that running ranks needs."""

    hosts: int
    mbit: float | Sequence[float]
    nics: int = 1
    folder: Path = field(init=False)

    @property
    def rates(self) -> list[float]:
        """Mbit/s that plans are made for; nothing enforces them."""
        return list(self.mbit) if isinstance(self.mbit, Sequence) else [self.mbit] * self.hosts

    def __enter__(self) -> Loopback:
        self.folder = Path(tempfile.mkdtemp(prefix=owner_name()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, host: int, nic: int = 0) -> str:  # noqa: ARG002  as Cluster's
        return "127.0.0.1"

    def port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    def interfaces(self) -> list[str]:
        return ["lo"]

    def enter(self, host: int) -> list[str]:  # noqa: ARG002  as Cluster's
        return []

    def environment(self, host: int) -> dict[str, str]:
        # Ranks of two hosts must not meet in shared memory.
        return {"MESHCAST_HOST_ID": f"emulated host {host}"}
