"""Hosts as network namespaces: for each NIC a veth pair to the bridge of its network, shaped by token buckets
both ways. See owner.py for the names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from .cores import cores_of, short_slices
from .owner import is_stale, owner_name

_MOST_NICS = 4
_GONE_LIMIT = 5.0  # seconds that killed processes have to disappear
# Bytes that a socket may have in the queues below it. Linux allows 4 MiB, so that a few sockets overfill
# the queue of a slow link, and what is dropped there is sent again 200 ms later; the driver of a real link
# holds senders back before that.
_SOCKET_QUEUE = 128 * 1024
# The machine's congestion control would show in the figures: with BBR each connection all but rests for
# 200 ms once in ten seconds, to measure its round trip, and now and then a transfer of 300 ms takes 1.5 or 2
# times as long. Reno is in every kernel, and every namespace may choose it, unlike CUBIC.
_TCP = {"tcp_limit_output_bytes": _SOCKET_QUEUE, "tcp_congestion_control": "reno"}


class ClusterError(RuntimeError):
    """The cluster cannot be built here, or what ran on it failed; the text says why and what to do."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def missing() -> str:
    """Why no cluster can be built here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed: apt-get install {package}"
    return ""


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _processes(namespace: str) -> set[int]:
    return {int(pid) for pid in _run("ip", "netns", "pids", namespace).split()}


def _kill(pids: set[int]) -> None:
    """Ends processes and waits until they are gone: a namespace lives as long as a process in it."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    end = time.monotonic() + _GONE_LIMIT
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}/ns/net") for pid in pids):
        time.sleep(0.01)


def _remove(namespace: str) -> None:
    """Also where another process removes it at the same time, as two that find the same stale one do."""
    try:
        _kill(_processes(namespace))
        _run("ip", "netns", "delete", namespace)
    except ClusterError:
        if namespace in _namespaces():
            raise


def remove_stale() -> list[str]:
    """Removes what clusters left behind whose owner has ended: processes, namespaces with their links, and
    folders. Returns the names of namespaces and folders."""
    removed = [name for name in _namespaces() if is_stale(name)]
    for name in removed:
        _remove(name)
    for folder in Path(tempfile.gettempdir()).glob("mc*"):
        if is_stale(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed


@dataclass
class Cluster:
    """`hosts` namespaces with `nics` links each, of `mbit` Mbit/s each way. Use as a context manager.

    mbit: one rate for all hosts, or one for each. NIC i of every host is on network i. The bridges live in a
    namespace of their own, so that nothing of the machine's own network is touched.
    own_cores: what runs on a host keeps to a core or its part of them, and this process and all that it
    starts from then on take turns on the cores quickly (cores.py); good for ranks that only transfer.
    """

    hosts: int
    mbit: float | Sequence[float]
    nics: int = 1
    own_cores: bool = True
    owner: str = field(default_factory=owner_name)
    folder: Path = field(init=False)  # for whatever files a run needs; removed with the cluster
    variables: dict[str, str] = field(default_factory=dict)  # of what runs on the hosts

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
        if why := missing():
            raise ClusterError(why)
        remove_stale()
        if self.own_cores and (why := short_slices()):
            print(f"# {why}: ranks that share a core wait for it longer than they would", file=sys.stderr)
        self.folder = Path(tempfile.mkdtemp(prefix=self.owner))
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
        return f"{self.owner}h{host}"

    def address(self, host: int, nic: int = 0) -> str:
        """Exists only inside the namespaces."""
        return f"10.201.{nic}.{host + 1}"

    def port(self) -> int:
        """A port that is free on host 0, which nobody else uses."""
        return 29511

    def interfaces(self) -> list[str]:
        return [f"eth{nic}" for nic in range(self.nics)]

    def enter(self, host: int) -> list[str]:
        """What a command begins with to run on that host."""
        cores = ["taskset", "-c", cores_of(host, self.hosts)] if self.own_cores else []
        return [*cores, "ip", "netns", "exec", self.namespace(host)]

    def environment(self, host: int) -> dict[str, str]:  # noqa: ARG002  as Loopback's
        return dict(self.variables)

    def processes(self) -> set[int]:
        """Of all hosts."""
        return set().union(*(_processes(self.namespace(host)) for host in range(self.hosts)))

    def kill(self, pids: set[int]) -> None:
        _kill(pids)

    @property
    def switch(self) -> str:
        return f"{self.owner}b"

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        for nic in range(self.nics):
            _run("ip", "-n", self.switch, "link", "add", f"bridge{nic}", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", f"bridge{nic}", "up")
        for host, rate in enumerate(self.rates):
            name = self.namespace(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for key, value in _TCP.items():
                _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} >/proc/sys/net/ipv4/{key}")
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
        """Ends what still runs on the hosts and removes the namespaces; links and shapers go with them.
        Idempotent."""
        listed = set(_namespaces())
        for name in [self.switch, *(self.namespace(host) for host in range(self.hosts))]:
            if name in listed:
                _remove(name)
        shutil.rmtree(self.folder, ignore_errors=True)


def _shape(namespace: str, device: str, mbit: float) -> None:
    # The bucket holds about 4 ms of traffic: small enough not to show in a transfer of 300 ms.
    burst = max(int(mbit * 1e6 / 8 * 0.004), 64 * 1024)
    shape = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)
