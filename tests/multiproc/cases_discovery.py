"""Discovery and measurement of a topology, on five ranks of which each thinks to be on a host of its own
choice."""

from __future__ import annotations

import os
from unittest import mock

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast.errors import LayoutError
from meshcast.resharding import measure as measure_module
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def on_host(context, hosts: str) -> None:
    """Rank i says it is on host hosts[i]."""
    os.environ["MESHCAST_HOST_ID"] = hosts[context.rank]


def agreed(topology: meshcast.Topology) -> None:
    """Plans are only equal if the topologies are."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, topology.to_json())
    assert len(set(found)) == 1, found


def discovers_hosts_with_given_rates(context) -> None:
    on_host(context, "abcab")
    topology = meshcast.Topology.discover(nic_gbps=4, local_gbps=32, latency_us=7)
    agreed(topology)
    assert [host.ranks for host in topology.hosts] == [(0, 3), (1, 4), (2,)]
    for host in topology.hosts:
        assert len(host.nics) >= 1
        assert host.local_rate == 4_000_000_000
    assert topology.latency == pytest.approx(7e-6)


def unknown_speeds_are_not_guessed(context) -> None:
    on_host(context, "aabbb")
    speeds = {"lo0": None} if context.rank == 0 else {"lo0": 10.0}
    from meshcast import topology

    links, topology.network_links = topology.network_links, lambda: speeds
    try:
        with pytest.raises(LayoutError, match=r"speed of lo0 on the host of ranks \[0, 1\]; give nic_gbps"):
            meshcast.Topology.discover()
        known = meshcast.Topology.discover(nic_gbps=2.5)
    finally:
        topology.network_links = links
    assert [host.nics[0].out_rate for host in known.hosts] == [312_500_000, 1_250_000_000]


def one_host_needs_no_link(context) -> None:
    on_host(context, "aaaaa")
    topology = meshcast.Topology.discover(local_gbps=8)
    agreed(topology)
    assert [host.ranks for host in topology.hosts] == [(0, 1, 2, 3, 4)]


def measures_every_host(context) -> None:
    on_host(context, "abbab")
    topology = meshcast.measure_topology(seconds=0.01)
    agreed(topology)
    assert [host.ranks for host in topology.hosts] == [(0, 3), (1, 2, 4)]
    for host in topology.hosts:
        (nic,) = host.nics
        # Loopback moves more than this on any machine, and less than memory does.
        for rate in (nic.out_rate, nic.in_rate, host.local_rate):
            assert 1e6 < rate < 1e12
    assert 0 < topology.latency < 1
    # What was measured plans transfers.
    left, right = DeviceMesh("cpu", [0, 3]), DeviceMesh("cpu", [1, 2, 4])
    full = torch.arange(70).reshape(10, 7)
    x = distribute_tensor(full, left, [Shard(0)], src_data_rank=None)
    y = meshcast.reshard(x, right, [Replicate()], topology=topology)
    if context.rank in (1, 2, 4):
        assert torch.equal(y.to_local(), full)


def measures_one_host_and_sub_groups(context) -> None:
    on_host(context, "aaaab")
    group = dist.new_group([1, 2, 3])
    if context.rank in (1, 2, 3):
        topology = meshcast.measure_topology(group, seconds=0.01)
        assert [host.ranks for host in topology.hosts] == [(1, 2, 3)]
    with pytest.raises(LayoutError, match="seconds"):
        meshcast.measure_topology(seconds=0)


def a_group_without_messages_between_cpus_is_refused(context) -> None:
    """As one of NCCL alone. It has collectives between GPUs; here those of the whole job take their place."""
    on_host(context, "abbab")
    gpus = dist.new_group(backend="cuda:gloo")
    gathered = measure_module.gather_facts
    with (
        mock.patch.object(
            measure_module, "gather_facts", lambda fact, _, *check: gathered(fact, None, *check)
        ),
        pytest.raises(
            LayoutError, match="give init_process_group or new_group the backends cpu:gloo,cuda:nccl"
        ),
    ):
        meshcast.measure_topology(gpus, seconds=0.01)


CASES = [
    discovers_hosts_with_given_rates,
    unknown_speeds_are_not_guessed,
    one_host_needs_no_link,
    measures_every_host,
    measures_one_host_and_sub_groups,
    a_group_without_messages_between_cpus_is_refused,
]
