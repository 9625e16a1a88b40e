"""Hosts as network namespaces: one veth pair per host to a bridge, shaped by token buckets both ways.

Every name starts with `mc` and the pid of the owner, so that what a killed owner left behind can be found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from types import TracebackType

_PREFIX = "mc"
_NAME = re.compile(rf"^{_PREFIX}(\d+)[hbv]")
_SUBNET = "10.201.0"  # exists only inside the namespaces


class ClusterError(RuntimeError):
    """The cluster cannot be built here; the text says why and what to do."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise ClusterError("network namespaces need root; run as root, or use the loopback figures only")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ClusterError(f"`{tool}` is not installed: apt-get install iproute2")


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def remove_stale() -> list[str]:
    """Removes namespaces and links whose owner has ended. Returns their names."""
    removed = []
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        match = _NAME.match(name)
        if match and not _alive(int(match[1])):
            _run("ip", "netns", "delete", name)
            removed.append(name)
    return removed


@dataclass
class Cluster:
    """`hosts` namespaces whose links carry `mbit` Mbit/s each way. Use as a context manager.

    The bridge lives in a namespace of its own, so that nothing of the machine's own network is touched.
    """

    hosts: int
    mbit: float
    owner: int = field(default_factory=os.getpid)

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

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    @property
    def switch(self) -> str:
        return f"{_PREFIX}{self.owner}b"

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for host in range(self.hosts):
            name, port = self.namespace(host), f"port{host}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(
                "ip",
                "-n",
                name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.switch,
            )
            _run("ip", "-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            self._shape(name, "eth0")  # what the host sends
            self._shape(self.switch, port)  # what it receives

    def _shape(self, namespace: str, device: str) -> None:
        # The bucket holds about 4 ms of traffic: small enough not to show in a transfer of 300 ms.
        burst = max(int(self.mbit * 1e6 / 8 * 0.004), 64 * 1024)
        shape = ["rate", f"{self.mbit}mbit", "burst", str(burst), "latency", "100ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)

    def close(self) -> None:
        """Removes the namespaces; links and shapers go with them. Idempotent."""
        listed = {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()}
        for name in [self.switch, *(self.namespace(host) for host in range(self.hosts))]:
            if name in listed:
                _run("ip", "netns", "delete", name)
