"""Topologies: JSON round trip, grouping by host, and bad input."""

import contextlib
import json
import os
import pickle
import random
from pathlib import Path

import meshcast
import planning_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshcast import Layout, LayoutError, Topology
from meshcast.base import settings as variables
from meshcast.base.settings import memory_identity
from meshcast.topology import Host, Nic, host_identity

PAIR = Layout.parse("4:S0"), Layout.parse("4@4:S0")


def test_json_round_trip(tmp_path: Path) -> None:
    for seed in range(50):
        topology = planning_cases.topology(random.Random(seed))
        assert Topology.from_json(topology.to_json()) == topology
        path = tmp_path / "topology.json"
        path.write_text(topology.to_json())
        assert Topology.from_json(path) == Topology.from_json(str(path)) == topology
        assert pickle.loads(pickle.dumps(topology)) == topology
        assert hash(Topology.from_json(topology.to_json())) == hash(topology)


def test_uniform_rates_and_hosts() -> None:
    topology = Topology.uniform(3, 10, nics_per_host=2, local_gbps=80, latency_us=12.5)
    plan = meshcast.plan((8,), "int8", *PAIR, topology)
    assert [host.ranks for host in plan.hosts] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert all(host.nics == (Nic(1_250_000_000, 1_250_000_000),) * 2 for host in plan.hosts)
    assert all(host.local_rate == 10_000_000_000 for host in plan.hosts)
    assert topology.latency == 12.5e-6


def test_hosts_by_identity() -> None:
    topology = Topology.from_hosts({4: "b", 0: "a", 3: "b", 1: "a", 2: "c"}, nic_gbps=8)
    assert [host.ranks for host in topology.hosts] == [(0, 1), (2,), (3, 4)]
    assert topology.hosts[0].nics == (Nic(10**9, 10**9),)


def test_host_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHCAST_HOST_ID", raising=False)
    own = host_identity()
    assert own == host_identity() != ""
    monkeypatch.setenv("MESHCAST_HOST_ID", "rack 7")
    assert host_identity() == "rack 7"


def test_what_ranks_that_share_memory_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their host, as it is named, its kernel and their user."""
    monkeypatch.setenv("MESHCAST_HOST_ID", "rack 7")
    own = memory_identity()
    assert own == memory_identity()
    monkeypatch.setenv("MESHCAST_HOST_ID", "rack 8")
    assert memory_identity() != own
    monkeypatch.setenv("MESHCAST_HOST_ID", "rack 7")
    for place, name in ((variables, "_host_of_kernel"), (os, "geteuid")):
        with monkeypatch.context() as other:
            other.setattr(place, name, lambda: "another")
            assert memory_identity() != own
    assert memory_identity() == own


def test_striped_hosts_have_one_nic_as_fast_as_all_together() -> None:
    uniform = Topology.uniform(4, 10, nics_per_host=4, latency_us=7)
    assert uniform.striped() == Topology.uniform(4, 40, latency_us=7)
    unlike = Topology(
        [Host((0, 1), (Nic(10, 30), Nic(20, 25), Nic(15, 40)), 99), Host((2,), (Nic(5, 6),), 98)]
    )
    assert unlike.striped().hosts == (Host((0, 1), (Nic(30, 75),), 99), Host((2,), (Nic(5, 6),), 98))
    assert unlike.striped().latency == unlike.latency
    for single in (Topology.uniform(4, 10), uniform.striped(), unlike.striped()):
        assert single.striped() is single


def test_a_faster_network_makes_a_faster_plan() -> None:
    slow = meshcast.plan((1 << 20,), "float32", *PAIR, Topology.uniform(4, 1))
    fast = meshcast.plan((1 << 20,), "float32", *PAIR, Topology.uniform(4, 10))
    assert slow.lower_bound > 5 * fast.lower_bound


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((0, 10), "ranks_per_host 0"),
        ((2.5, 10), "ranks_per_host 2.5"),
        ((1 << 40, 10), "ranks_per_host"),
        ((4, 0), "nic_gbps 0"),
        ((4, -1), "nic_gbps -1"),
        ((4, float("nan")), "nic_gbps nan"),
        ((4, float("inf")), "nic_gbps inf"),
        ((4, 1e-12), "nic_gbps"),
        ((4, 1e30), "nic_gbps"),
        ((4, "10"), "nic_gbps '10'"),
        ((4, 10, 0), "nics_per_host 0"),
        ((4, 10, 1, 0), "local_gbps 0"),
        ((4, 10, 1, 80, -1), "latency_us -1"),
        ((4, 10, 1, 80, 1e12), "latency_us"),
    ],
)
def test_bad_uniform(arguments: tuple[object, ...], names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        Topology.uniform(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([], "at least one host"),
        ([Host((0,), (), 1)], "host 0 has no NIC"),
        ([Host((0,), (Nic(1, 1),), 1), Host((1, 0), (Nic(1, 1),), 1)], "rank 0 is on host 0 and on host 1"),
        ([Host((-1,), (Nic(1, 1),), 1)], "rank -1"),
        ([Host((0,), (Nic(0, 1),), 1)], "out_rate 0"),
        ([Host((0,), (Nic(1, 1 << 60),), 1)], "in_rate"),
        ([Host((0,), (Nic(1, 1),), 0)], "local_rate 0"),
        (["host"], "'host'"),
    ],
)
def test_bad_hosts(hosts: list[Host], names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        Topology(hosts)


def test_a_rank_without_host_is_named() -> None:
    with pytest.raises(LayoutError, match="rank 5"):
        meshcast.plan((8,), "int8", *PAIR, Topology([Host((0, 1, 2, 3, 4, 6, 7), (Nic(1, 1),), 1)]))


def test_a_rank_beyond_uniform_topologies_is_named() -> None:
    far = Layout([1 << 30], PAIR[0].placements)
    with pytest.raises(LayoutError, match=str(1 << 30)):
        meshcast.plan((8,), "int8", PAIR[0], far)


def _edited(**changes: object) -> str:
    text = Topology([Host((0, 1), (Nic(5, 6),), 7)], 3).to_json()
    return json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "not JSON"),
        ("{}", "'format' is missing"),
        (_edited(format="meshcast.plan/1"), "meshcast.topology/1"),
        (_edited(latency_ns="3"), "topology.latency_ns '3'"),
        (_edited(latency_ns=-1), "topology.latency_ns -1"),
        (_edited(latency_ns=1e400), "not JSON"),
        (_edited(hosts={}), "topology.hosts: expected a list"),
        (_edited(hosts=[3]), r"topology.hosts\[0\]: expected an object"),
        (_edited(hosts=[{"ranks": [0]}]), "'nics' is missing"),
        (_edited(hosts=[{"ranks": [1 << 40], "nics": [], "local_rate": 1}]), r"ranks\[0\]"),
        (_edited(extra=1), "unknown field 'extra'"),
        ("[" * 100_000, "No such file|name too long"),
        ('{"a":' * 100_000, "not JSON"),
    ],
)
def test_bad_json(text: str, names: str) -> None:
    with pytest.raises(LayoutError, match=names) as caught:
        Topology.from_json(text)
    assert len(str(caught.value)) < 400


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"nowhere\.json.*No such file"):
        Topology.from_json(tmp_path / "nowhere.json")
    with pytest.raises(LayoutError, match="expected a path"):
        Topology.from_json(7)  # type: ignore[arg-type]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match="UTF-8"):
        Topology.from_json(tmp_path / "binary")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["format", "latency_ns", "hosts", "uniform"]), JSON_VALUES)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_field_is_read_or_refused(name: str, value: object) -> None:
    with contextlib.suppress(LayoutError):
        Topology.from_json(_edited(**{name: value}))
