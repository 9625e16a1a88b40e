"""Ray nodes on this machine, each of which meshcast takes for a host."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 to mean the address that others know
STORE_BYTES = 80 << 20  # Ray's least; nothing large goes through its object store


@contextmanager
def emulated_hosts(actors: Sequence[int]) -> Iterator[None]:
    """Ray with a node for each number of `actors`: how many it takes, each for one CPU and one of `hostN`.
    Ends all of it in every case: where this process is killed, Ray's own end within two minutes.

    What actors print is in files, which stay where an error has passed through here."""
    # Of its own: `ray.init()` of other programs joins the cluster that it finds in Ray's usual folder. Short:
    # names of sockets are.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
    cluster = Cluster()
    try:
        try:
            for host, count in enumerate(actors):
                cluster.add_node(**_node(host, count))
            ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
    except BaseException:
        print(f"what the actors printed: {folder}/ray/session_latest/logs", file=sys.stderr, flush=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _node(host: int, actors: int) -> dict[str, Any]:
    """What makes this node small, and a host of its own for meshcast."""
    return {
        "node_ip_address": LOOPBACK,
        "num_cpus": actors,
        "resources": {f"host{host}": actors},
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "env_vars": {
            # Nodes share the network and the boot id, by which meshcast tells hosts.
            "MESHCAST_HOST_ID": f"host {host}",
            "GLOO_SOCKET_IFNAME": "lo",
            # Actors find what this process finds.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    }
