"""Links of a pipeline: one between any two neighbours, so that what a stage sends to the next and what it
sends back do not share a NIC. That is what the simulator assumes, and what hosts with a NIC for each
neighbour have."""

from __future__ import annotations

import subprocess

from ..cluster import Cluster, ClusterError

__all__ = ["join_neighbours"]

_BURST = 0.001  # seconds of traffic that a token bucket holds: a short transfer must not pass for free
_SOCKET = 96 * 1024  # bytes in a socket's send buffer, see join_neighbours


def join_neighbours(cluster: Cluster, mbit: float) -> None:
    """Joins each host with the next by a link of `mbit` each way, which all traffic between the two takes;
    the network of the cluster carries the rest.

    Also makes the send buffers of all hosts small, so that a send that is waited for ends near its arrival;
    but not so small that a link falls idle until it hears of what arrived, which should take longer while it
    also carries data the other way: with 64 KiB, steps without overlap took 5 % longer (100 ms transfers).
    """
    hosts = [cluster.namespace(host) for host in range(cluster.hosts)]
    for name in hosts:
        limits = f"echo '4096 16384 {_SOCKET}' > /proc/sys/net/ipv4/tcp_wmem"
        _run("ip", "netns", "exec", name, "sh", "-c", limits)
    # UCX takes an interface only for peers to which the host's best route begins there. So it chooses.
    cluster.variables = {
        "MESHCAST_IFNAMES": "",
        "UCX_NET_DEVICES": ",".join([*cluster.interfaces(), "next", "last"]),
    }
    for host in range(cluster.hosts - 1):
        here, there = hosts[host : host + 2]
        _run(*f"ip -n {here} link add next type veth peer name last netns {there}".split())
        for name, device, own, other in (
            (here, "next", cluster.address(host), cluster.address(host + 1)),
            (there, "last", cluster.address(host + 1), cluster.address(host)),
        ):
            _run("ip", "-n", name, "link", "set", device, "up")
            # Of the same address as the network's: what is sent to a neighbour goes this way by itself. UCX
            # uses no device without one.
            _run("ip", "-n", name, "addr", "add", f"{own}/32", "dev", device)
            _run(*f"ip -n {name} route add {other}/32 dev {device} src {own}".split())
            burst = max(int(mbit * 1e6 / 8 * _BURST), 8 * 1024)
            shape = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
