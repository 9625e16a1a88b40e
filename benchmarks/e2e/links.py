"""Links of a cluster that stands, set to another rate."""

from __future__ import annotations

import re
import subprocess

from ..cluster import Cluster, ClusterError

__all__ = ["set_rate"]

_BURST = 0.001  # seconds of traffic that a token bucket holds: a short transfer must not pass for free
_LEAST_BURST = 8 * 1024  # bytes; a bucket holds a few packets
_SOCKET = 64 * 1024  # bytes in a socket's send buffer: a send that is waited for ends near its arrival


def set_rate(cluster: Cluster, mbit: float) -> None:
    """Gives every link that rate each way and a small token bucket, every host small send buffers."""
    burst = max(int(mbit * 1e6 / 8 * _BURST), _LEAST_BURST)
    hosts = [cluster.namespace(host) for host in range(cluster.hosts)]
    for name in (*hosts, cluster.switch):
        for device in re.findall(r"qdisc tbf \S+ dev (\S+)", _run("tc", "-n", name, "qdisc", "show")):
            shape = ["rate", f"{mbit:.3f}mbit", "burst", str(burst), "latency", "100ms"]
            _run("tc", "-n", name, "qdisc", "change", "dev", device, "root", "tbf", *shape)
    for name in hosts:
        limits = f"echo '4096 16384 {_SOCKET}' > /proc/sys/net/ipv4/tcp_wmem"
        _run("ip", "netns", "exec", name, "sh", "-c", limits)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
