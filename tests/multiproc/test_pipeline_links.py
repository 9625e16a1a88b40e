"""The network of the pipeline benchmark: neighbours talk over a link of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import cluster as network
from benchmarks.cluster import Cluster, ClusterError, join_neighbours

pytestmark = pytest.mark.timeout(240)

_SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.settimeout(100)
    server.accept()[0].sendall(b"hello")
"""
_CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=100) as link:
    print(link.getsockname()[0], link.recv(5).decode())
"""


@pytest.fixture(scope="module")
def chain() -> Iterator[Cluster]:
    """Three hosts in a row. Skips, with the reason, where no network namespaces are allowed."""
    try:
        with Cluster(3, 100) as cluster:
            join_neighbours(cluster, 50)
            yield cluster
    except ClusterError as error:
        pytest.skip(f"no emulated cluster here: {error}")


@pytest.mark.parametrize(
    ("host", "other", "device"),
    [(0, 1, "next"), (1, 0, "last"), (1, 2, "next"), (2, 1, "last"), (0, 2, "eth0"), (2, 0, "eth0")],
)
def test_the_way_between_hosts(chain: Cluster, host: int, other: int, device: str) -> None:
    way = network._run("ip", "-n", chain.namespace(host), "route", "get", chain.address(other))
    assert f"dev {device} " in way
    assert f"src {chain.address(host)}" in way
    rate = network._run("tc", "-n", chain.namespace(host), "qdisc", "show", "dev", device)
    assert f"rate {100 if device == 'eth0' else 50}Mbit" in rate


@pytest.mark.parametrize(("host", "other"), [(0, 1), (2, 1), (0, 2)])
def test_hosts_reach_each_other(chain: Cluster, host: int, other: int) -> None:
    address = chain.address(other)
    python = [sys.executable, "-c"]
    with subprocess.Popen(
        [*chain.enter(other), *python, _SERVER, address], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        heard = network._run(*chain.enter(host), *python, _CLIENT, address, port)
        assert server.wait(timeout=100) == 0
    assert heard.split() == [chain.address(host), "hello"]
