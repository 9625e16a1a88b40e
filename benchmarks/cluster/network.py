"""Hosts as network namespaces: for each NIC a veth pair to the bridge of its network, shaped by token buckets
both ways.

Every name starts with `mc` and the pid of the owner, so that what a killed owner left behind can be found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

_PREFIX = "mc"
_NAME = re.compile(rf"^{_PREFIX}(\d+)[hb]")
_MOST_NICS = 4


class ClusterError(RuntimeError):
    """The cluster cannot be built here; the text says why and what to do."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise ClusterError("network namespaces need root; run as root, or on loopback with --loopback")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ClusterError(f"`{tool}` is not installed: apt-get install iproute2")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def remove_stale() -> list[str]:
    """Removes namespaces, and with them links, whose owner has ended. Returns their names."""
    removed = []
    for name in _namespaces():
        match = _NAME.match(name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            _run("ip", "netns", "delete", name)
            removed.append(name)
    return removed


@dataclass
class Cluster:
    """`hosts` namespaces with `nics` links each, of `mbit` Mbit/s each way. Use as a context manager.

    mbit: one rate for all hosts, or one for each. NIC i of every host is on network i. The bridges live in a
    namespace of their own, so that nothing of the machine's own network is touched.
    """

    hosts: int
    mbit: float | Sequence[float]
    nics: int = 1
    owner: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        rates = self.rates
        if self.hosts < 1 or len(rates) != self.hosts or min(rates) <= 0:
            raise ClusterError(f"{self.hosts} hosts with rates {rates}: give each a positive rate in Mbit/s")
        if not 1 <= self.nics <= _MOST_NICS:
            raise ClusterError(f"{self.nics} NICs per host: allowed are 1 to {_MOST_NICS}")

    @property
    def rates(self) -> list[float]:
        """Mbit/s of each host's links."""
        return list(self.mbit) if isinstance(self.mbit, Sequence) else [self.mbit] * self.hosts

    def __enter__(self) -> Cluster:
        _require_tools()
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, host: int) -> str:
        return f"{_PREFIX}{self.owner}h{host}"

    def address(self, host: int, nic: int = 0) -> str:
        """Exists only inside the namespaces."""
        return f"10.201.{nic}.{host + 1}"

    def interfaces(self) -> list[str]:
        return [f"eth{nic}" for nic in range(self.nics)]

    @property
    def switch(self) -> str:
        return f"{_PREFIX}{self.owner}b"

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        for nic in range(self.nics):
            _run("ip", "-n", self.switch, "link", "add", f"bridge{nic}", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", f"bridge{nic}", "up")
        for host, rate in enumerate(self.rates):
            name = self.namespace(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for nic, device in enumerate(self.interfaces()):
                port = f"port{host}x{nic}"
                _run(
                    *f"ip -n {name} link add {device} type veth peer name {port} netns {self.switch}".split()
                )
                _run("ip", "-n", self.switch, "link", "set", port, "master", f"bridge{nic}", "up")
                _run("ip", "-n", name, "addr", "add", f"{self.address(host, nic)}/24", "dev", device)
                _run("ip", "-n", name, "link", "set", device, "up")
                _shape(name, device, rate)  # what the host sends
                _shape(self.switch, port, rate)  # what it receives

    def close(self) -> None:
        """Removes the namespaces; links and shapers go with them. Idempotent."""
        listed = set(_namespaces())
        for name in [self.switch, *(self.namespace(host) for host in range(self.hosts))]:
            if name in listed:
                _run("ip", "netns", "delete", name)


def _shape(namespace: str, device: str, mbit: float) -> None:
    # The bucket holds about 4 ms of traffic: small enough not to show in a transfer of 300 ms.
    burst = max(int(mbit * 1e6 / 8 * 0.004), 64 * 1024)
    shape = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)
