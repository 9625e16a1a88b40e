"""Every reshard of random layout pairs equals what plain PyTorch cuts out of the gathered tensor: 280 of them
where all ranks share memory, 80 over the network alone with each copy of UCX, 80 with ranks of several hosts,
40 over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world
from multiproc.libraries import LIBRARIES, need_system

# Most of the time goes into starting torch; the limits leave room for a busy machine.
pytestmark = pytest.mark.timeout(330)

FOLDER = Path(__file__).parent
SIZES = {"memory": [2, 3, 4, 5, 6, 7, 7], "network": [5, 7], "gloo": [7], "hosts": [5, 7]}


@pytest.fixture(scope="module")
def memory() -> WorldResult:
    return _run("memory", {"HOSTS": "0"})


@pytest.fixture(scope="module", params=LIBRARIES)
def network(request: pytest.FixtureRequest) -> WorldResult:
    if request.param == "system":
        need_system()
    return _run("network", {"HOSTS": "0", "MESHCAST_SHM": "0", "MESHCAST_UCX": request.param})


@pytest.fixture(scope="module")
def gloo() -> WorldResult:
    return _run("gloo", {"HOSTS": "0", "MESHCAST_SHM": "0", "MESHCAST_TRANSPORT": "gloo"})


@pytest.fixture(scope="module")
def hosts() -> WorldResult:
    return _run("hosts", {"HOSTS": "3"})


def _run(kind: str, env: dict[str, str]) -> WorldResult:
    sizes = ",".join(map(str, SIZES[kind]))
    return run_world(FOLDER / "cases_property.py", 7, limit=300, env={"SIZES": sizes, **env})


def _case_names(kind: str) -> list[str]:
    return [f"{form}_{i}_world_{n}" for form in ("sync", "async") for i, n in enumerate(SIZES[kind])]


@pytest.mark.parametrize("case", _case_names("memory"))
def test_equals_gather_and_slice(memory: WorldResult, case: str) -> None:
    memory.check(case)


@pytest.mark.parametrize("case", _case_names("network"))
def test_over_the_network(network: WorldResult, case: str) -> None:
    network.check(case)


@pytest.mark.parametrize("case", _case_names("gloo"))
def test_over_gloo(gloo: WorldResult, case: str) -> None:
    gloo.check(case)


@pytest.mark.parametrize("case", _case_names("hosts"))
def test_ranks_of_several_hosts(hosts: WorldResult, case: str) -> None:
    hosts.check(case)


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind != "network"])
def test_processes_end_cleanly(kind: str, request: pytest.FixtureRequest) -> None:
    _check_ends(request.getfixturevalue(kind), kind)


def test_processes_of_the_network_end_cleanly(network: WorldResult) -> None:
    _check_ends(network, "network")


def _check_ends(world: WorldResult, kind: str) -> None:
    world.check_ends()
    assert {case for result in world.ranks for case in result.cases} == set(_case_names(kind))
