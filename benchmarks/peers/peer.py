"""A program outside torch that moves the tensor of a case."""

from __future__ import annotations

from typing import Any, Protocol

from meshcast import Topology
from meshcast.bench.cases import Case

from ..cluster import Cluster


class Peer(Protocol):
    """One that is not installed is named as such in the output, never left out in silence."""

    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str:
        """For the table that explains the methods."""
        ...

    def missing(self) -> str:
        """What to install, or ""."""
        ...

    def why_not(self, case: Case) -> str:
        """Why it cannot do the case, or ""."""
        ...

    def run(
        self, cluster: Cluster, case: Case, topology: Topology, repeats: int, slow: float
    ) -> dict[str, Any]:
        """{"seconds", "busy"} of each repeat, {"wrong_bytes"} of all; only one repeat where one takes
        longer than `slow` seconds. Raises RuntimeError with the program's output where it fails."""
        ...
